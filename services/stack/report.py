"""The report of a run: what every stage published, checked to add up, as tables, JSON and plots."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.files import read_json, replace_json
from services.ledger import check_balance, count_assembled, count_generated
from services.runs import Run, read_settings
from services.stack.merge_table import mix_table
from services.stack.number_table import number_table
from services.stack.plots import plot_acceptance, plot_loss
from services.stack.stages import EVALUATED


def collect_report(run: Run) -> dict[str, Any]:
    """Gather the report from the run's files; stages that are not done are null.

    Raises:
        UserError: a stage's totals are not those of the stage before.
    """
    settings = read_settings(run)
    prepared = _read(run.prepared)
    generated = {
        name: {
            "prompts": counts.prompts,
            "completed": counts.completed,
            "rejected": dict(counts.rejected),
            "failed": dict(counts.failed),
            "output_tokens": counts.output_tokens,
        }
        for name, counts in count_generated(run).items()
    }
    assembled = _by_source(count_assembled(run))
    merged = _read(run.merged)
    _check(prepared, generated, assembled, merged)
    return {
        "run": run.name,
        "target": settings.target.served_name,
        "cores": os.cpu_count(),
        "prepared": prepared,
        "generated": generated,
        "assembled": assembled,
        "merged": merged,
        "training": _training(run),
        "acceptance": {which: _read(run.evaluation(which)) for which in EVALUATED},
        "export": str(run.export) if run.export.is_dir() else None,
    }


def write_report(report: dict[str, Any], run: Run, folder: Path) -> None:
    """Write report.json, and the plots for which there is something to draw, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_json(folder / "report.json", report)
    if report["training"]:
        plot_loss(_metrics(run), folder / "loss.png")
    before, after = (report["acceptance"][which] for which in EVALUATED)
    if before and after:
        plot_acceptance(_lengths(before), _lengths(after), folder / "acceptance.png")


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print the report's tables; a stage that is not done is left out."""
    if report["prepared"] and report["generated"]:
        console.print(_prompts_table(report))
        for what in ("rejected", "failed"):
            console.print(_reasons(what, report["generated"]))
    if report["merged"]:
        console.print(mix_table(report["merged"]))
        if dropped := report["merged"]["dropped"]:
            console.print("dropped in the merge: " + ", ".join(f"{count} {why}" for why, count in dropped.items()))
    if training := report["training"]:
        console.print(
            f"training: {training['steps']:,} steps, {training['tokens']:,} tokens in {training['seconds']:.0f} s "
            f"({training['tokens_per_second']:,.0f} tok/s), loss {training['first_loss']:.3f} -> "
            f"{training['last_loss']:.3f}"
        )
    if all(report["acceptance"].values()):
        console.print(_acceptance_table(report["acceptance"]))
        checks = [_lossless(which, report["acceptance"][which]["lossless"]) for which in EVALUATED]
        console.print("greedy; 1 is the target alone, and every token is compared with the target's own:")
        console.print(f"  {'; '.join(checks)}")


def _check(
    prepared: dict[str, Any] | None,
    generated: dict[str, dict[str, Any]],
    assembled: dict[str, dict[str, Any]],
    merged: dict[str, Any] | None,
) -> None:
    for name, counts in generated.items():
        kept = prepared["sources"][name]["kept"] if prepared else 0
        check_balance(f"prompts of {name}", kept, {"in chunks": counts["prompts"]})
        if name in assembled:
            dropped = sum(assembled[name]["dropped"].values())
            parts = {"samples": assembled[name]["samples"], "dropped": dropped}
            check_balance(f"answers of {name}", assembled[name]["completed"], parts)
    if merged:
        samples = sum(counts["samples"] for counts in assembled.values())
        check_balance("merge", samples, {"added": merged["added"]["samples"], **merged["dropped"]})
        parts = {"before": merged["before"]["samples"], "added": merged["added"]["samples"]}
        check_balance("dataset", merged["after"]["samples"], parts)


def _by_source(chunks: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The chunks' counts added up by source."""
    totals: dict[str, dict[str, Any]] = {}
    for chunk in chunks.values():
        total = totals.setdefault(chunk["source"], {"dropped": Counter()})
        for key, value in chunk.items():
            if isinstance(value, int):
                total[key] = total.get(key, 0) + value
        total["dropped"].update(chunk["dropped"])
    return totals


def _training(run: Run) -> dict[str, Any] | None:
    lines = _metrics(run)
    if not lines:
        return None
    first, last = lines[0], lines[-1]
    tokens = sum(line["tokens"] for line in lines)
    return {
        "steps": last["step"],
        "tokens": tokens,
        "seconds": last["seconds"],
        "tokens_per_second": tokens / last["seconds"],
        "first_loss": first["loss"],
        "last_loss": last["loss"],
        "last_accuracy": last["accuracy"],
    }


def _metrics(run: Run) -> list[dict[str, Any]]:
    if not run.training_metrics.is_file():
        return []
    return [json.loads(line) for line in run.training_metrics.read_text().splitlines()]


def _prompts_table(report: dict[str, Any]) -> Table:
    columns = ("rows read", "prompts", "completed", "rejected", "failed", "samples", "tokens", "answer tokens")
    table = number_table("source", *columns, title="prompts and answers", gap=1)
    rows = []
    for name, generated in report["generated"].items():
        assembled = report["assembled"].get(name, {"samples": 0, "tokens": 0, "supervised_tokens": 0})
        counts = (
            report["prepared"]["sources"][name]["read"],
            generated["prompts"],
            generated["completed"],
            Counter(generated["rejected"]),
            Counter(generated["failed"]),
            assembled["samples"],
            assembled["tokens"],
            assembled["supervised_tokens"],
        )
        rows.append(counts)
        table.add_row(name, *map(_cell, counts))
    table.add_section()
    table.add_row("all", *(_cell(_sum(column)) for column in zip(*rows, strict=True)))
    return table


def _acceptance_table(acceptance: dict[str, Any]) -> Table:
    before, after = acceptance["before"], acceptance["after"]
    columns = ("prompts", "before", "after", "tokens", "degenerate")
    table = number_table("source", *columns, title="acceptance length on held-out prompts")
    overall = {"all": (before["overall"], after["overall"])}
    by_source = {name: (before["by_source"][name], part) for name, part in after["by_source"].items()}
    for name, (old, new) in {**by_source, **overall}.items():
        if name == "all":
            table.add_section()
        lengths = (_length(old), f"[b]{_length(new)}[/]")
        table.add_row(name, f"{new['prompts']}", *lengths, f"{new['tokens']:,}", f"{new['degenerate']}")
    return table


def _lossless(which: str, lossless: dict[str, Any]) -> str:
    ties = len(lossless["numeric_ties"])
    tied = f", {ties} numeric ties" if ties else ""
    return f"{which} {lossless['compared_tokens']:,} equal, {len(lossless['mismatches'])} prompts differ{tied}"


def _lengths(evaluation: dict[str, Any]) -> dict[str, float]:
    parts = {**evaluation["by_source"], "all": evaluation["overall"]}
    return {name: part["acceptance_length"] or 0.0 for name, part in parts.items()}


def _length(part: dict[str, Any]) -> str:
    return f"{part['acceptance_length']:.3f}" if part["acceptance_length"] else "-"


def _sum(column: tuple[Any, ...]) -> Any:
    return sum(column, Counter()) if isinstance(column[0], Counter) else sum(column)


def _cell(value: Any) -> str:
    return f"{value.total() if isinstance(value, Counter) else value:,}"


def _reasons(what: str, generated: dict[str, dict[str, Any]]) -> str:
    parts = [
        f"{source}: {reason} {count}" for source, counts in generated.items() for reason, count in counts[what].items()
    ]
    return f"{what}: {', '.join(parts)}" if parts else f"{what}: none"


def _read(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None
