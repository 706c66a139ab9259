"""The tables of a merge, from its merge.json."""

from typing import Any

from rich.table import Table

from services.stack.number_table import number_table

COUNTS = ("samples", "tokens", "supervised_tokens")


def merge_tables(merged: dict[str, Any]) -> list[Table | str]:
    """All that a merge has to tell: the mix, what each run added, the lengths, and how the base came in."""
    return [mix_table(merged), _runs_table(merged), lengths_table(merged), _told(merged)]


def mix_table(merged: dict[str, Any]) -> Table:
    """Samples and tokens of the dataset by source, and before and after the merge."""
    columns = ("samples", "%", "tokens", "%", "supervised tokens")
    table = number_table("source", *columns, title="dataset: the existing corpus and what was added")
    _add_parts(table, merged["sources"])
    if len(domains := merged.get("domains", {})) > 1:
        table.add_section()
        _add_parts(table, domains)
    table.add_section()
    for name in ("before", "added", "after"):
        part = merged[name]
        growth = merged["growth_percent"] if name == "added" else {}
        table.add_row(
            name,
            f"{part['samples']:,}",
            _growth(growth.get("samples")),
            f"{part['tokens']:,}",
            _growth(growth.get("tokens")),
            f"{part['supervised_tokens']:,}",
        )
    return table


def lengths_table(merged: dict[str, Any]) -> Table:
    """Samples by length, before, added and after."""
    columns = [name for name in ("before", "added", "after") if merged.get(name)]
    table = number_table("up to", *columns, title="tokens a sample")
    table.columns[0].justify = "right"
    for bound in sorted({int(bound) for column in columns for bound in merged[column]["lengths"]}):
        counts = [merged[column]["lengths"].get(str(bound), 0) for column in columns]
        table.add_row(f"{bound:,}", *(f"{count:,}" for count in counts))
    return table


def _runs_table(merged: dict[str, Any]) -> Table:
    table = number_table("run", "assembled", "added", "tokens", "supervised tokens", "dropped", title="runs")
    for name, part in merged["runs"].items():
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in part["dropped"].items())
        counts = (part["assembled"], *(part[count] for count in COUNTS))
        table.add_row(name, *(f"{count:,}" for count in counts), dropped or "0")
    return table


def _told(merged: dict[str, Any]) -> str:
    base = merged["base"]
    came = f"base {base['path']}: {base['shards']} shards {base['how']}" if base else "no base"
    checked = "read whole, and the numbers are those" if merged["verified"] else "not read (--verify)"
    return f"{came}; {checked}"


def _add_parts(table: Table, parts: dict[str, dict[str, Any]]) -> None:
    for name, part in parts.items():
        shares = (f"{part['samples_percent']:.1f}", f"{part['tokens_percent']:.1f}")
        samples, tokens, supervised = (f"{part[count]:,}" for count in COUNTS)
        table.add_row(name, samples, shares[0], tokens, shares[1], supervised)


def _growth(percent: float | None) -> str:
    return f"+{percent:.1f}" if percent is not None else ""
