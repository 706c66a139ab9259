"""Acceptance after training with each term of the loss, on the same data, for the same CPU time, with several seeds.

    make bench-objectives ARGUMENTS="--dataset DATASET --held-out held_out.jsonl --cpu-seconds 110"

One run at a time; a repeated command takes up where the last one was stopped. The target's states are computed
beforehand and cost no run anything: in training, the terms with a teacher need the whole target's forward pass and the
others only its layers up to the deepest tap. See `comparison`.
"""

# ruff: noqa: T201  (a command: what it prints is for the one who called it)
from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from datasets import load_from_disk

from tests.benchmarks.comparison import add_arguments, make_job, measure, prepare, run_trainer, setting_of

OBJECTIVES: dict[str, dict[str, float]] = {
    "ce": {"ce": 1.0},
    "dpace": {"ce": 0.0, "dpace": 1.0},
    "kl": {"ce": 0.0, "kl": 1.0},
    "tv": {"ce": 0.0, "tv": 1.0},
    "lk_alpha": {"ce": 0.0, "lk_alpha": 1.0},
    "lk_lambda": {"ce": 0.0, "lk_lambda": 1.0},
}


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    samples = first_samples(arguments.dataset, arguments.samples, arguments.output)
    # Fewer anchors than a long run would have: more steps, and more progress, in a short one.
    setting = setting_of(arguments, samples, snapshots=1, anchors=8, with_final=True)
    dataset, target, cases = prepare(setting)
    runs = arguments.output / "runs"
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in arguments.seeds:
        for name in arguments.objectives:
            folder = f"{name}-{seed}"
            run_trainer("ours.py", make_job(setting, runs / folder, OBJECTIVES[name], seed))
            start, end = measure(target, cases, setting, runs, folder)
            found.setdefault(name, []).append({"seed": seed, **end})
            print(f"{name}, seed {seed}: {end['step']} steps, {end['acceptance_length']:.3f}", flush=True)
    facts = {"samples": len(dataset), "tokens": int(dataset.lengths.sum()), "prompts": len(cases), "start": start}
    (arguments.output / "objectives.json").write_text(json.dumps(facts | {"found": found}, indent=1) + "\n")
    print(table(found, start))


def first_samples(dataset: Path, count: int, output: Path) -> Path:
    """Return a dataset of the first `count` samples of `dataset`, written into `output`."""
    folder = output / f"first-{count}-samples"
    if not folder.exists():
        samples = load_from_disk(os.fspath(dataset))
        samples.select(range(min(count, len(samples)))).save_to_disk(os.fspath(folder))
    return folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, "bench-objectives", cpu_seconds=110.0)
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="of the order of the data and the anchors")
    parser.add_argument("--samples", type=int, default=240, help="first so many of the dataset")
    return parser.parse_args()


def table(found: dict[str, list[dict[str, Any]]], start: dict[str, Any]) -> str:
    """Return what was found in Markdown: each seed's acceptance length, and means over the seeds."""
    seeds = [point["seed"] for point in next(iter(found.values()))]
    columns = [
        "objective",
        "steps",
        "CPU s",
        *(f"seed {seed}" for seed in seeds),
        "mean",
        "1st guess kept",
        "recall@16",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, points in {"before training": [start] * len(seeds), **found}.items():
        lengths = [point["acceptance_length"] for point in points]
        cells = [
            name,
            *(" and ".join(f"{point[key]:.0f}" for point in points) for key in ("step", "cpu")),
            *(f"{length:.3f}" for length in lengths),
            f"{mean(lengths):.3f}",
            f"{mean(point['acceptance_by_position'][0] for point in points):.3f}",
            f"{mean(point['recall'] for point in points):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
