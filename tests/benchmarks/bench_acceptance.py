"""Acceptance over training: this project's trainer and SpecForge's on the same data, for the same CPU time.

    make bench-acceptance ARGUMENTS="--dataset DATASET --held-out held_out.jsonl --cpu-seconds 720"

All trainers start from the same drafter, read the same features of the target (computed once, beforehand, for none of
them to pay) and have one thread each; two run at once. Each leaves snapshots of its drafter, and all snapshots are
measured by exact acceptance on the same answers of the target to held-out prompts.
"""

# ruff: noqa: T201  (a command: what it prints is for the one who called it)
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

import torch

from dflash.acceptance import Answer, count, guess_everywhere, summarize
from dflash.config import DraftConfig, default_gamma
from dflash.data import open_dataset
from dflash.export import load_draft, write_draft
from dflash.held_out import check_held_out
from dflash.initialize import initialize
from dflash.journal import Journal
from dflash.rollouts import Prompt, read_prompts, roll_out, rollout_settings
from dflash.target import Target, capture, load_target
from tests.benchmarks.trainers.states import make_states
from tests.parity.peers import install

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = Path(__file__).with_name("trainers")
SPECFORGE = "SpecForge"
# As the demo's: of use at once, so that a short run shows a difference.
DRAFT = DraftConfig(num_layers=1, block_size=4, target_layer_ids=(13,), mask_token_id=16, init="target")
OBJECTIVES: dict[str, dict[str, float]] = {
    "ours": {"ce": 1.0},
    "dpace": {"ce": 0.0, "dpace": 1.0},
    "kl": {"ce": 0.0, "kl": 1.0},
    "lk_lambda": {"ce": 0.1, "lk_lambda": 0.9},
}


class Job(TypedDict):
    """What a trainer gets, as JSON."""

    config: dict[str, Any]  # keys of dflash.config.TrainingConfig
    start: str  # folder of the drafter before training
    states: str  # folder of the target's features
    output: str
    cpu_seconds: float  # of training; the learning rate ends there
    snapshots: int


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    dataset = open_dataset(arguments.dataset)
    prompts = _some_of_each_source(read_prompts(arguments.held_out), arguments.prompts)
    check_held_out(prompts, dataset, arguments.held_out)
    samples = [dataset.sample(row, arguments.max_length).input_ids for row in range(len(dataset))]
    taps = DRAFT.target_layer_ids or ()
    states = output / f"features-{'-'.join(map(str, taps))}"
    make_states(arguments.target, samples, taps, states)
    target = load_target(arguments.target, torch.float32)
    write_draft(initialize(DRAFT, target, seed=0), output / "start", torch.float32)
    runs = arguments.measure or output / time.strftime("runs-%Y%m%d-%H%M%S")
    if arguments.measure is None:
        with ThreadPoolExecutor(arguments.at_once) as pool:
            list(pool.map(lambda name: _train(name, _job(name, runs / name, states, arguments)), arguments.trainers))
    curves = _measure(target, prompts, output, runs, arguments)
    facts = {
        "samples": len(dataset),
        "tokens": int(dataset.lengths.sum()),
        "prompts": len(prompts),
        "answer_tokens": arguments.max_new_tokens,
        "cpu_seconds": arguments.cpu_seconds,
        "learning_rate": arguments.learning_rate,
        "curves": curves,
    }
    (output / "curves.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(table(curves))
    print(f"{output / 'curves.json'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, default=ROOT / "var/models/SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", type=Path, required=True, help="samples of the target's own answers")
    parser.add_argument("--held-out", type=Path, required=True, help="JSONL: prompt_id, source, input_ids")
    parser.add_argument("--output", type=Path, default=ROOT / "var/bench-acceptance")
    parser.add_argument("--cpu-seconds", type=float, default=720.0, help="training of each")
    parser.add_argument("--snapshots", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4, help="held-out prompts of each source")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of the target's answer to one")
    parser.add_argument("--max-length", type=int, default=416, help="tokens of a sample")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--at-once", type=int, default=2, help="trainers that run at the same time")
    parser.add_argument("--measure", type=Path, metavar="RUNS", help="only measure what was trained into this folder")
    names = [*OBJECTIVES, SPECFORGE]
    parser.add_argument("--trainers", nargs="+", choices=names, default=["ours", SPECFORGE])
    return parser.parse_args()


def _job(name: str, output: Path, states: Path, arguments: argparse.Namespace) -> Job:
    config = {
        "target": str(arguments.target),
        "dataset": str(arguments.dataset),
        "output": str(output),
        "steps": 1,
        "draft": DRAFT.model_dump(),
        "gamma": default_gamma(DRAFT.block_size),
        "objective": OBJECTIVES.get(name, {}),
        "anchors": 16,
        "anchors_per": "sequence",
        "max_batch_size": 8,
        "token_budget": 8 * arguments.max_length,
        "max_length": arguments.max_length,
        "learning_rate": arguments.learning_rate,
        "seed": 0,
        "threads": 1,
    }
    return {
        "config": config,
        "start": str(output.parent.parent / "start"),
        "states": str(states),
        "output": str(output),
        "cpu_seconds": arguments.cpu_seconds,
        "snapshots": arguments.snapshots,
    }


def _train(name: str, job: Job) -> None:
    output = Path(job["output"])
    output.mkdir(parents=True)
    path = output / "job.json"
    path.write_text(json.dumps(job))
    peer = [str(install("specforge"))] if name == SPECFORGE else []
    # -P and the order of the path: SpecForge's process sees its own packages, not this project's dflash.
    settings = {"PYTHONPATH": os.pathsep.join([*peer, str(ROOT)]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = TRAINERS / ("specforge.py" if name == SPECFORGE else "ours.py")
    with (output / "train.log").open("w") as log:
        command = [sys.executable, "-P", "-W", "ignore", str(script), str(path)]
        status = subprocess.run(command, env=os.environ | settings, stdout=log, stderr=log, check=False)
    if status.returncode:
        raise SystemExit(f"bench_acceptance: {name} ended with status {status.returncode}: see {output / 'train.log'}")


def _some_of_each_source(prompts: list[Prompt], count: int) -> list[Prompt]:
    chosen: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        of_source = chosen.setdefault(prompt.source, [])
        if len(of_source) < count:
            of_source.append(prompt)
    return [prompt for of_source in chosen.values() for prompt in of_source]


def _measure(
    target: Target, prompts: list[Prompt], output: Path, runs: Path, arguments: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Return each trainer's curve: steps, CPU seconds and acceptance of every snapshot, all and by source."""
    settings = rollout_settings(arguments.target, arguments.max_new_tokens, "float32")
    rollouts = Journal(output / "rollouts.jsonl", settings, replace_other=True)  # kept: a repetition begins with them
    for first in range(0, len(prompts), 12):
        roll_out(target, prompts[first : first + 12], rollouts, arguments.max_new_tokens)
    answers = [Answer(prompt.input_ids, rollouts.records[prompt.key]["tokens"]) for prompt in prompts]
    taps = DRAFT.target_layer_ids or ()
    features = [capture(target, torch.tensor([a.prompt_ids + a.tokens]), taps)[0] for a in answers]

    def acceptance(draft_folder: Path) -> dict[str, Any]:
        draft = load_draft(draft_folder)
        counts: dict[str, list[Any]] = {}
        for prompt, answer, states in zip(prompts, answers, features, strict=True):
            found = count(answer, guess_everywhere(target, draft, answer, states))
            counts.setdefault(prompt.source, []).append(found)
        size = DRAFT.block_size
        return {
            **summarize([item for items in counts.values() for item in items], size),
            "by_source": {source: summarize(items, size) for source, items in sorted(counts.items())},
        }

    before = {"step": 0, "cpu": 0.0, "wall": 0.0, **acceptance(output / "start")}
    curves: dict[str, list[dict[str, Any]]] = {}
    for name in arguments.trainers:
        stamps = [json.loads(line) for line in (runs / name / "stamps.jsonl").read_text().splitlines()]
        folder = runs / name / "checkpoints"
        curves[name] = [before, *(s | acceptance(folder / f"step-{s['step']:08d}" / "draft") for s in stamps)]
    return curves


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
