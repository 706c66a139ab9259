"""Tables of numbers that fit into a terminal of 80 columns."""

from rich.box import Box
from rich.table import Table

# A rule under the header and between sections; nothing beside the columns.
RULES = Box("    \n    \n ── \n    \n ── \n ── \n    \n    \n")


def number_table(first: str, *numbers: str, title: str | None = None, gap: int = 2) -> Table:
    """An empty table: a column of names, and columns of numbers with `gap` spaces between them.

    Where a terminal is too narrow, names are folded before a number is cut.
    """
    table = Table(
        title=title, title_justify="left", box=RULES, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False
    )
    table.add_column(first, overflow="fold", min_width=6)
    for name in numbers:
        table.add_column("\n".join(name.split()), justify="right", no_wrap=True)
    return table
