"""Acceptance over training: this project's trainer and SpecForge's on the same data, for the same CPU time.

    make bench-acceptance ARGUMENTS="--dataset DATASET --held-out held_out.jsonl --cpu-seconds 720"

The two train at the same time; see `comparison` for what they share and how they are measured.
"""

# ruff: noqa: T201  (a command: what it prints is for the one who called it)
from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.comparison import add_arguments, make_job, measure, prepare, run_trainer, setting_of

SCRIPTS = {"ours": "ours.py", "SpecForge": "specforge.py"}


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    setting = setting_of(arguments, arguments.dataset, arguments.snapshots, anchors=16, with_final=False)
    dataset, target, cases = prepare(setting)
    runs = arguments.measure or arguments.output / time.strftime("runs-%Y%m%d-%H%M%S")
    if arguments.measure is None:
        with ThreadPoolExecutor(len(SCRIPTS)) as pool:
            jobs = {name: make_job(setting, runs / name, {}, seed=0) for name in SCRIPTS}
            list(pool.map(run_trainer, SCRIPTS.values(), jobs.values()))
    curves = {name: measure(target, cases, setting, runs, name) for name in SCRIPTS}
    facts = {
        "samples": len(dataset),
        "tokens": int(dataset.lengths.sum()),
        "prompts": len(cases),
        "answer_tokens": setting.max_new_tokens,
        "cpu_seconds": setting.cpu_seconds,
        "learning_rate": setting.learning_rate,
        "curves": curves,
    }
    (arguments.output / "curves.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(table(curves))
    print(f"{arguments.output / 'curves.json'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, "bench-acceptance", cpu_seconds=720.0)
    parser.add_argument("--snapshots", type=int, default=5)
    parser.add_argument("--measure", type=Path, metavar="RUNS", help="only measure what was trained into this folder")
    return parser.parse_args()


def table(curves: dict[str, list[dict[str, Any]]]) -> str:
    """Return both tables in Markdown: over training, and by source at the end."""
    lines = [
        "| trainer | steps | CPU s | acceptance length | 1st guess kept | recall@16 |",
        "|---|---|---|---|---|---|",
    ]
    for name, curve in curves.items():
        for point in curve:
            first = point["acceptance_by_position"][0]
            lines.append(
                f"| {name} | {point['step']} | {point['cpu']:.0f} | {point['acceptance_length']:.3f} | {first:.3f} | "
                f"{point['recall']:.3f} |"
            )
    sources = sorted(next(iter(curves.values()))[-1]["by_source"])
    lines += ["", f"| source | {' | '.join(curves)} |", f"|---|{'---|' * len(curves)}"]
    for source in sources:
        last = [f"{curve[-1]['by_source'][source]['acceptance_length']:.3f}" for curve in curves.values()]
        lines.append(f"| {source} | {' | '.join(last)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
