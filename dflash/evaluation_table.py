"""An acceptance report as a table for the terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dflash.acceptance import CANDIDATES


def print_evaluation(report: dict[str, Any], console: Console) -> None:
    """Print the report of `dflash.evaluate`: a row a source, a thinking mode, and all."""
    # Eleven columns in a terminal of 80: words of a header stand on each other, and names are folded before numbers.
    table = Table(title="acceptance length on held-out prompts", title_justify="left")
    table.box, table.show_edge, table.pad_edge, table.padding = SIMPLE_HEAD, False, False, 0
    table.add_column("", overflow="fold", min_width=6)
    with_tree = "tree" in report["overall"]
    columns = ["prompts", "degen-\nerate", "tokens", "length", *(["with\ntrees"] if with_tree else [])]
    columns += ["tokens\na call", "tok/s", "target\nalone", f"recall\n@{CANDIDATES}", "oracle\nlength"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, part in report["by_source"].items():
        table.add_row(name, *_cells(part, with_tree))
    if set(report["by_thinking"]) != {"not set"}:
        table.add_section()
        for name, part in report["by_thinking"].items():
            table.add_row(f"thinking {name}", *_cells(part, with_tree))
    table.add_section()
    table.add_row("all", *_cells(report["overall"], with_tree))
    console.print(table)
    positions = " ".join(f"{share:.2f}" for share in report["overall"]["acceptance_by_position"])
    console.print(f"guesses 1, 2, ... kept: {positions}")
    if report["not_decoded"] is not None:
        console.print(f"counted on the target's own answers, not decoded: {report['not_decoded']}", soft_wrap=True)
        return
    for which, key in (("", "lossless"), (" with trees", "tree_lossless")):
        if key in report:
            console.print(_lossless(which, report[key]), soft_wrap=True)


def _cells(part: dict[str, Any], with_tree: bool) -> list[str]:
    return [
        f"{part['prompts']}",
        f"{part['degenerate']}",
        f"{part['tokens']:,}",
        _number(part["acceptance_length"]),
        *([_number(part["tree"]["acceptance_length"])] if with_tree else []),
        _number(part["tokens_per_target_call"]),
        _number(part["tokens_per_second"], 1),
        _number(part["target_alone_tokens_per_second"], 1),
        _number(part["recall"]),
        _number(part["oracle_length"]),
    ]


def _lossless(which: str, lossless: dict[str, Any]) -> str:
    if lossless["lossless"] is None:
        return "sampled: distributed as the target alone samples, so no token can be compared with its own"
    return (
        f"greedy{which}: {lossless['compared_tokens']:,} tokens equal the target's own, "
        f"{len(lossless['mismatches'])} prompts differ, {len(lossless['numeric_ties'])} numeric ties"
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
