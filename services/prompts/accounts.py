"""The account of a source: what became of every row, and the mix of all sources together."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.ledger import check_balance
from services.settings import CorpusMix, SourceSettings

EXAMPLES_A_REASON = 5


@dataclass
class SourceCounts:
    """What became of every row of one source.

    `read` = `rejected` + `duplicates` + `contaminated` + `over_length` + `not_needed` + `kept` + `held_out`. Rows are
    drawn in the order of their ranks until the quota is full; `not_needed` were not drawn, so that near duplicates,
    overlaps with evaluation sets and lengths were looked for among the others only. `lengths` counts the kept prompts
    by the least power of two that is not below their tokens.
    """

    source: str
    domain: str
    quota: int
    read: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    duplicates: Counter[str] = field(default_factory=Counter)
    contaminated: Counter[str] = field(default_factory=Counter)
    over_length: int = 0
    not_needed: int = 0
    kept: int = 0
    held_out: int = 0
    prompt_tokens: int = 0
    held_out_tokens: int = 0
    tools_as_text: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    files: list[str] = field(default_factory=list)
    commit: str | None = None
    damaged: list[str] = field(default_factory=list)
    rejected_rows: dict[str, list[str]] = field(default_factory=dict)

    def reject(self, path: Path, row: int, reason: str) -> None:
        self.rejected[reason] += 1
        examples = self.rejected_rows.setdefault(reason, [])
        if len(examples) < EXAMPLES_A_REASON:
            examples.append(f"{path} row {row}")

    def check(self) -> None:
        """Raises UserError when the rows do not add up."""
        check_balance(
            f"source {self.source}",
            self.read,
            {
                "rejected": self.rejected.total(),
                "duplicates": self.duplicates.total(),
                "contaminated": self.contaminated.total(),
                "over length": self.over_length,
                "not needed": self.not_needed,
                "kept": self.kept,
                "held out": self.held_out,
            },
        )

    def explained(self) -> str:
        """Why no row is left, in words."""
        return (
            f"rejected: {_listed(self.rejected)}; duplicates: {_listed(self.duplicates)}; contaminated: "
            f"{_listed(self.contaminated)}; over length: {self.over_length}; held out: {self.held_out}"
        )

    def content(self) -> dict[str, Any]:
        """As JSON."""
        lengths = {str(length): self.lengths[length] for length in sorted(self.lengths)}
        return {**vars(self), "lengths": lengths}


def bucket(tokens: int) -> int:
    """The least power of two that is not below `tokens`."""
    return 1 << max(tokens - 1, 0).bit_length()


def total(accounts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The accounts added up; `quota` too."""
    numbers: Counter[str] = Counter()
    by_word: dict[str, Counter[str]] = {
        name: Counter() for name in ("rejected", "duplicates", "contaminated", "lengths")
    }
    for account in accounts:
        numbers.update({name: value for name, value in account.items() if isinstance(value, int)})
        for name, counter in by_word.items():
            counter.update(account[name])
    lengths = by_word.pop("lengths")
    listed = {name: dict(counter) for name, counter in by_word.items()}
    return {**numbers, **listed, "lengths": {key: lengths[key] for key in sorted(lengths, key=int)}}


def mix(accounts: Iterable[Mapping[str, Any]], corpus: CorpusMix | None) -> dict[str, dict[str, dict[str, float]]]:
    """Samples and percent by domain: of the existing corpus (`before`), of the prompts, and of both (`after`).

    Without a corpus there is only `prompts`.
    """
    prompts: Counter[str] = Counter()
    for account in accounts:
        prompts[account["domain"]] += account["kept"]
    shares = {"prompts": _shares(prompts)}
    if corpus is None:
        return shares
    before = Counter({name: round(corpus.samples * percent / 100) for name, percent in corpus.percent.items()})
    if rest := corpus.samples - before.total():
        before["other"] += rest
    return {"before": _shares(before), **shares, "after": _shares(before + prompts)}


def warnings(accounts: Iterable[Mapping[str, Any]], sources: Sequence[SourceSettings]) -> list[str]:
    """What a user should know of the sources, one line each."""
    told = []
    for account, source in zip(accounts, sources, strict=True):
        name = f"source {source.name}"
        if account["kept"] < source.quota:
            told.append(f"{name}: {account['kept']} prompts, its quota is {source.quota}")
        if account["tools_as_text"]:
            shown = f"{account['tools_as_text']} prompts have them in the system prompt"
            told.append(f"{name}: the template shows no tools; {shown}")
        if account["commit"] and account["commit"] != source.revision:
            told.append(f"{name}: revision {source.revision} may move; it was at commit {account['commit']}")
        told += [f"{name}: {damage}" for damage in account["damaged"]]
    return told


def _shares(counts: Mapping[str, int]) -> dict[str, dict[str, float]]:
    whole = sum(counts.values())
    return {
        name: {"samples": count, "percent": round(100 * count / whole, 1) if whole else 0.0}
        for name, count in sorted(counts.items(), key=lambda item: -item[1])
    }


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common()) or "none"
