"""The numbers of a merge, as merge.json tells them, checked to add up."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from services.errors import UserError
from services.ledger import check_balance
from services.sample_rows import Totals
from services.tokenizer.base import Base
from services.tokenizer.new_samples import Added

UNKNOWN_DOMAIN = "unknown"
COUNTED = ("samples", "tokens", "supervised_tokens")


def account(before: Totals, base: Base | None, base_source: str, added: Sequence[Added]) -> dict[str, Any]:
    """The base, each run and the result in samples and tokens; the result by source and domain; what was dropped.

    Raises:
        UserError: a sum does not come out.
    """
    for part in added:
        what = f"run {part.run}, source {part.source}"
        check_balance(what, part.assembled, {"samples": part.totals.samples, **part.dropped})
    new = _sum(part.totals for part in added)
    after = _sum([before, new])
    if not after.samples:
        raise UserError("the dataset would have no sample: every new one was dropped; see merge.min_supervised_tokens")
    mix = _mix(before, base, base_source, added)
    for name in COUNTED:
        parts = {source: part[name] for source, part in mix.items()}
        check_balance(f"{name} by source", after.as_json()[name], parts)
    return {
        "before": before.as_json(),
        "added": new.as_json(),
        "after": after.as_json(),
        "growth_percent": {
            name: round(100 * new.as_json()[name] / before.as_json()[name], 2) for name in COUNTED if before.samples
        },
        "assembled": sum(part.assembled for part in added),
        "dropped": dict(sum((part.dropped for part in added), Counter[str]())),
        "runs": {
            run: {
                **_sum(part.totals for part in of_run).as_json(),
                "assembled": sum(part.assembled for part in of_run),
                "dropped": dict(sum((part.dropped for part in of_run), Counter[str]())),
            }
            for run in dict.fromkeys(part.run for part in added)
            for of_run in [[part for part in added if part.run == run]]
        },
        "sources": _with_shares(mix, after),
        "domains": _with_shares(_by_domain(mix), after),
    }


def check_totals(where: str, expected: Totals, found: Totals) -> None:
    """Raises UserError when what was read is not what was counted."""
    if found != expected:
        told = " and ".join(
            f"{totals.samples} samples, {totals.tokens} tokens, {totals.supervised_tokens} supervised"
            for totals in (expected, found)
        )
        raise UserError(f"{where}: the account and what is in the shards differ: {told}; a shard was changed")


def _mix(before: Totals, base: Base | None, base_source: str, added: Sequence[Added]) -> dict[str, dict[str, Any]]:
    """Samples and tokens by source. What an earlier merge made tells its own sources."""
    mix: dict[str, dict[str, Any]] = {}

    def add(source: str, domain: str, counts: dict[str, Any]) -> None:
        part = mix.setdefault(source, {"domain": domain, **dict.fromkeys(COUNTED, 0)})
        for name in COUNTED:
            part[name] += counts[name]

    if base and base.record:
        for source, counts in base.record["sources"].items():
            add(source, counts["domain"], counts)
    elif base:
        add(base_source, UNKNOWN_DOMAIN, before.as_json())
    for part in added:
        add(part.source, part.domain, part.totals.as_json())
    return mix


def _by_domain(mix: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    domains: dict[str, dict[str, Any]] = {}
    for part in mix.values():
        domain = domains.setdefault(part["domain"], dict.fromkeys(COUNTED, 0))
        for name in COUNTED:
            domain[name] += part[name]
    return domains


def _with_shares(parts: dict[str, dict[str, Any]], after: Totals) -> dict[str, dict[str, Any]]:
    return {
        name: {
            **part,
            "samples_percent": round(100 * part["samples"] / after.samples, 2),
            "tokens_percent": round(100 * part["tokens"] / after.tokens, 2),
        }
        for name, part in parts.items()
    }


def _sum(parts: Iterable[Totals]) -> Totals:
    total = Totals()
    for part in parts:
        total.include(part)
    return total
