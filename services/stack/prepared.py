"""What `prepare` made of the sources: the account of every row, the mix by domain, and the prompts' lengths."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from services.stack.number_table import number_table

BAR_WIDTH = 40

# Column of the table, and key of the account.
COLUMNS = {
    "read": "read",
    "rejected": "rejected",
    "duplicates": "duplicates",
    "contaminated": "contaminated",
    "over length": "over_length",
    "not needed": "not_needed",
    "held out": "held_out",
    "kept": "kept",
    "quota": "quota",
}
REASONS = ("rejected", "duplicates", "contaminated")


def print_prepared(content: Mapping[str, Any], console: Console) -> None:
    """Print the content of prepare.json."""
    console.print(_rows_table(content))
    for name in REASONS:
        console.print(_reasons(name, content["sources"]), markup=False)
    console.print(_mix_table(content["mix"]))
    console.print(_lengths_table(content["total"]))
    for warning in content["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def print_preview(preview: Mapping[str, list[str]], console: Console) -> None:
    """Print rendered prompts by source, as the target sees them."""
    for source, texts in preview.items():
        for number, text in enumerate(texts, start=1):
            console.rule(f"{source} {number} of {len(texts)}", align="left")
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _rows_table(content: Mapping[str, Any]) -> Table:
    table = number_table("source", *COLUMNS, title="rows and what became of them", gap=1)
    for name, account in content["sources"].items():
        table.add_row(name, *(_cell(account[key]) for key in COLUMNS.values()))
    table.add_section()
    table.add_row("all", *(_cell(content["total"][key]) for key in COLUMNS.values()))
    return table


def _mix_table(mix: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    titles = {"before": "corpus before", "prompts": "prompts", "after": "corpus after"}
    columns = [column for name in mix for column in (titles[name], "%")]
    table = number_table("domain", *columns, title="mix by domain")
    for domain in dict.fromkeys(domain for part in mix.values() for domain in part):
        cells: list[str] = []
        for part in mix.values():
            share = part.get(domain, {"samples": 0, "percent": 0.0})
            cells += [f"{share['samples']:,}", f"{share['percent']:.1f}"]
        table.add_row(domain, *cells)
    return table


def _lengths_table(total: Mapping[str, Any]) -> Table:
    table = number_table("up to", "prompts", title=f"tokens in a kept prompt ({total['prompt_tokens']:,} in all)")
    table.columns[0].justify = "right"
    table.add_column("", no_wrap=True)
    most = max(total["lengths"].values(), default=1)
    for length, count in total["lengths"].items():
        table.add_row(f"{int(length):,}", f"{count:,}", "█" * round(BAR_WIDTH * count / most))
    return table


def _reasons(name: str, sources: Mapping[str, Mapping[str, Any]]) -> str:
    listed = [
        f"{source}: " + ", ".join(f"{reason} {count:,}" for reason, count in sorted(account[name].items()))
        for source, account in sources.items()
        if account[name]
    ]
    return f"{name}: {'; '.join(listed) or 'none'}"


def _cell(value: int | Mapping[str, int]) -> str:
    return f"{value if isinstance(value, int) else sum(value.values()):,}"
