"""Prompts that overlap an evaluation set: they are dropped, so that acceptance is measured on unseen prompts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.errors import UserError
from services.prompts.adapters import Rejected, adapt
from services.prompts.reading import read_rows
from services.prompts.text import ngrams, user_text, words
from services.settings import DecontaminateSettings, RowsSettings


class EvaluationSets:
    """The word n-grams of the evaluation sets' prompts, each with the set that it is from.

    A prompt with fewer words than `ngram` has one n-gram, all of them: it overlaps only with its equal.
    """

    def __init__(self, settings: DecontaminateSettings, files: Mapping[str, Sequence[Path]]) -> None:
        """Read the sets; `files` has the local files of each.

        Raises:
            UserError: a file cannot be read, or a set has no prompt.
        """
        self._size = settings.ngram
        self._owners: dict[str, str] = {}
        self.accounts = {shape.name: self._add(shape, files[shape.name]) for shape in settings.against}

    def find(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The name of a set that the prompt overlaps (the first by name), or None."""
        if not self._owners:
            return None
        found = self._owners.keys() & ngrams(words(user_text(messages)), self._size)
        return min((self._owners[ngram] for ngram in found), default=None)

    def _add(self, shape: RowsSettings, files: Sequence[Path]) -> dict[str, Any]:
        prompts, rejected = 0, Counter[str]()
        for row in (row for path in files for row in read_rows(path, shape.columns())):
            try:
                if row.value is None:
                    raise Rejected(row.fault or "not_an_object")
                messages = adapt(row.value, shape).messages
            except Rejected as error:
                rejected[str(error)] += 1
                continue
            prompts += 1
            for ngram in ngrams(words(user_text(messages)), self._size):
                self._owners.setdefault(ngram, shape.name)
        if not prompts:
            raise UserError(
                f"evaluation set {shape.name}: no prompt in {', '.join(map(str, files))} (rejected: {dict(rejected)}); "
                "check its adapter and column"
            )
        return {"prompts": prompts, "rejected": dict(rejected)}
