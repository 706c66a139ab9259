"""releases.jsonl as a table."""

from collections.abc import Sequence

from rich.table import Column, Table

from services.stack.operate.images import differences
from services.stack.operate.releases import Entry

COLUMNS = ("when", "change", "image", "torch", "CUDA", "idle MB", "ended", "why")
STATES = {"done": "replaced", "undone": "undone", "begun": "interrupted"}


def history_table(entries: Sequence[Entry]) -> Table:
    """A row for each change: its last line says how it ended."""
    table = Table(*(Column(name, no_wrap=name in {"when", "change"}) for name in COLUMNS))
    changes = [entry for entry in entries if entry.event != "measured"]
    in_use = {entry.role: entry for entry in changes if entry.event == "done"}.values()
    for number, entry in enumerate(changes):
        last = number + 1 == len(changes)
        if entry.event == "begun" and not last:
            continue
        contents = entry.to.contents
        what = ", ".join(differences(entry.before.contents, contents)) if entry.before else ""
        table.add_row(
            entry.when,
            f"{entry.action} {entry.role}",
            f"{entry.to.reference}\n{entry.to.short}",
            contents.get("torch") or "",
            contents.get("cuda") or "",
            _idle(entry),
            "in use" if any(entry is one for one in in_use) else STATES[entry.event],
            "\n".join(part for part in (entry.why.strip("; "), what) if part),
        )
    return table


def _idle(entry: Entry) -> str:
    return "\n".join(f"{holder} {max(stages.values()) / 1e6:,.0f}" for holder, stages in (entry.budget or {}).items())
