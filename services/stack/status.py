"""The table of a run's standing."""

from collections import Counter

from rich.table import Table

from services.ledger import GenerateCounts, count_assembled, count_generated
from services.runs import Run


def status_table(run: Run) -> Table:
    """Prompts, answers and samples by source, from the run's files."""
    table = Table(title=f"run {run.name}", title_justify="left")
    table.add_column("source")
    for column in ("prompts", "completed", "rejected", "failed", "in work", "waiting", "tokens out", "samples"):
        table.add_column(column, justify="right")
    counts = count_generated(run)
    samples: Counter[str] = Counter()
    for assembled in count_assembled(run).values():
        samples[assembled["source"]] += assembled["samples"]
    for source, of_source in counts.items():
        table.add_row(source, *_cells(of_source, samples[source]))
    table.add_section()
    table.add_row("all", *_cells(_total(list(counts.values())), samples.total()))
    return table


def _cells(counts: GenerateCounts, samples: int) -> list[str]:
    return [
        f"{counts.prompts:,}",
        f"{counts.completed:,}",
        _with_reasons(counts.rejected),
        _with_reasons(counts.failed),
        f"{counts.in_journal:,}",
        f"{counts.waiting:,}",
        f"{counts.output_tokens:,}",
        f"{samples:,}",
    ]


def _with_reasons(reasons: Counter[str]) -> str:
    listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    return f"{reasons.total():,} ({listed})" if listed else "0"


def _total(counts: list[GenerateCounts]) -> GenerateCounts:
    total = GenerateCounts()
    for count in counts:
        total.prompts += count.prompts
        total.completed += count.completed
        total.rejected += count.rejected
        total.failed += count.failed
        total.output_tokens += count.output_tokens
        total.in_journal += count.in_journal
        total.chunks += count.chunks
        total.chunks_done += count.chunks_done
    return total
