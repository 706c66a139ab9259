"""Encode a rendering piece by piece, so that renderings that share most of their text share most of the work.

A tokenizer cuts its added tokens (`<|im_end|>`, `<think>`) out of the text before anything else, and encodes what
lies between them independently. So the pieces' ids, end to end, are the ids of the whole.
"""

import os
import re
from collections.abc import Sequence

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from services.errors import UserError

REMEMBERED_PIECES = 4096
SHORT = 64


class PieceEncoder:
    """Splits text at a tokenizer's added tokens and encodes the pieces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError("the tokenizer is no fast one (no tokenizer.json); save the model's fast tokenizer")
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        # A token that takes white space from its neighbours, or is looked for after normalizing, is not independent.
        separable = all(
            not (token.lstrip or token.rstrip or token.single_word or token.normalized) for token in added.values()
        )
        self.ids = {token.content: number for number, token in added.items()} if separable else {}
        self.special = {token.content for token in added.values() if token.special}
        # The longest first, as the tokenizer does it.
        contents = sorted(self.ids, key=len, reverse=True)
        # What they all begin with, told apart, is what lets `re` skip the text between them.
        common = os.path.commonprefix(contents)  # noqa: RUF071  (of texts, not of paths)
        rests = "|".join(re.escape(content.removeprefix(common)) for content in contents)
        self._boundary = re.compile(f"({re.escape(common)}(?:{rests}))") if contents else None
        self._remembered: dict[str, list[int]] = {}

    def split(self, text: str) -> list[str]:
        """The pieces: added tokens, and what lies between them. Joined they are the text."""
        return [piece for piece in self._boundary.split(text) if piece] if self._boundary else [text]

    def added_in(self, text: str) -> tuple[str, ...]:
        """The added tokens in a text, in their order."""
        return tuple(self._boundary.findall(text)) if self._boundary else ()

    def encode(self, pieces: Sequence[str]) -> list[list[int]]:
        """Ids of each piece."""
        known = self._remembered
        unknown = [piece for piece in pieces if piece not in self.ids and piece not in known]
        encodings = self._backend.encode_batch_fast(unknown, add_special_tokens=False) if unknown else []
        fresh = {piece: encoding.ids for piece, encoding in zip(unknown, encodings, strict=True)}
        if len(known) > REMEMBERED_PIECES:
            known.clear()
        known.update((piece, ids) for piece, ids in fresh.items() if len(piece) <= SHORT)
        return [
            [self.ids[piece]] if piece in self.ids else fresh[piece] if piece in fresh else known[piece]
            for piece in pieces
        ]
