"""Trainers of the same drafter on the same data for the same CPU time, and the acceptance of what they trained.

All start from the same first weights, read the same features of the target (computed once, beforehand, for none of them
to pay) and have one thread each. Each leaves snapshots of its drafter, and all snapshots are measured by exact
acceptance on the same answers of the target to held-out prompts. What was measured is kept in the folder of the runs as
it comes, so that a measurement that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from dflash.acceptance import Answer, Counts, count, guess_everywhere, summarize
from dflash.config import DraftConfig, default_gamma
from dflash.data import Dataset, open_dataset
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
# As the demo's: of use at once, so that a short run shows a difference.
DRAFT = DraftConfig(num_layers=1, block_size=4, target_layer_ids=(13,), mask_token_id=16, init="target")
ANSWERED_AT_ONCE = 12


@dataclass(frozen=True)
class Setting:
    """What all trainers of a comparison share."""

    target: Path
    dataset: Path
    held_out: Path
    output: Path  # folder of what is computed once: features, first weights, answers
    cpu_seconds: float  # of training; the learning rate ends there
    snapshots: int
    prompts_of_each_source: int
    max_new_tokens: int
    max_length: int
    anchors: int  # blocks of a sample, and at most 8 samples are a step
    learning_rate: float
    with_final: bool  # whether the target's last hidden states are kept too, which a teacher's objective needs

    @property
    def states(self) -> Path:
        """Folder of the target's features."""
        taps = "-".join(map(str, DRAFT.target_layer_ids or ()))
        return self.output / f"features-{taps}{'-final' if self.with_final else ''}"


class Job(TypedDict):
    """What a trainer gets, as JSON."""

    config: dict[str, Any]  # keys of dflash.config.TrainingConfig
    start: str  # folder of the drafter before training
    states: str
    output: str
    cpu_seconds: float
    snapshots: int


class HeldOut(NamedTuple):
    """A held-out prompt, the target's answer to it, and the features of both: [prompt + answer, taps * hidden]."""

    prompt: Prompt
    answer: Answer
    features: Tensor


def add_arguments(parser: argparse.ArgumentParser, output: str, cpu_seconds: float) -> None:
    """Add the arguments that `setting_of` reads; `output` is a folder under var/."""
    parser.add_argument("--target", type=Path, default=ROOT / "var/models/SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", type=Path, required=True, help="samples of the target's own answers")
    parser.add_argument("--held-out", type=Path, required=True, help="JSONL: prompt_id, source, input_ids")
    parser.add_argument("--output", type=Path, default=ROOT / "var" / output)
    parser.add_argument("--cpu-seconds", type=float, default=cpu_seconds, help="training of each")
    parser.add_argument("--prompts", type=int, default=4, help="held-out prompts of each source")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of the target's answer to one")
    parser.add_argument("--max-length", type=int, default=416, help="tokens of a sample")
    parser.add_argument("--learning-rate", type=float, default=2e-3)


def setting_of(arguments: argparse.Namespace, dataset: Path, snapshots: int, anchors: int, with_final: bool) -> Setting:
    """Return the setting of a comparison on `dataset`."""
    return Setting(
        target=arguments.target,
        dataset=dataset,
        held_out=arguments.held_out,
        output=arguments.output,
        cpu_seconds=arguments.cpu_seconds,
        snapshots=snapshots,
        prompts_of_each_source=arguments.prompts,
        max_new_tokens=arguments.max_new_tokens,
        max_length=arguments.max_length,
        anchors=anchors,
        learning_rate=arguments.learning_rate,
        with_final=with_final,
    )


def prepare(setting: Setting) -> tuple[Dataset, Target, list[HeldOut]]:
    """Compute what all trainers and measurements share, as far as it is not in `setting.output` yet."""
    setting.output.mkdir(parents=True, exist_ok=True)
    dataset = open_dataset(setting.dataset)
    prompts = some_of_each_source(read_prompts(setting.held_out), setting.prompts_of_each_source)
    check_held_out(prompts, dataset, setting.held_out)
    samples = [dataset.sample(row, setting.max_length).input_ids for row in range(len(dataset))]
    taps = DRAFT.target_layer_ids or ()
    make_states(setting.target, samples, taps, setting.states, setting.with_final)
    target = load_target(setting.target, torch.float32)
    write_draft(initialize(DRAFT, target, seed=0), setting.output / "start", torch.float32)
    settings = rollout_settings(setting.target, setting.max_new_tokens, "float32")
    rollouts = Journal(setting.output / "rollouts.jsonl", settings, replace_other=True)
    for first in range(0, len(prompts), ANSWERED_AT_ONCE):
        roll_out(target, prompts[first : first + ANSWERED_AT_ONCE], rollouts, setting.max_new_tokens)
    answers = [Answer(prompt.input_ids, rollouts.records[prompt.key]["tokens"]) for prompt in prompts]
    features = [capture(target, torch.tensor([a.prompt_ids + a.tokens]), taps)[0] for a in answers]
    return dataset, target, [HeldOut(*case) for case in zip(prompts, answers, features, strict=True)]


def some_of_each_source(prompts: list[Prompt], count: int) -> list[Prompt]:
    """Return the first `count` prompts of each source."""
    chosen: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        of_source = chosen.setdefault(prompt.source, [])
        if len(of_source) < count:
            of_source.append(prompt)
    return [prompt for of_source in chosen.values() for prompt in of_source]


def make_job(setting: Setting, output: Path, objective: dict[str, float], seed: int) -> Job:
    """Return what a trainer that writes to `output` gets."""
    config = {
        "target": str(setting.target),
        "dataset": str(setting.dataset),
        "output": str(output),
        "steps": 1,
        "draft": DRAFT.model_dump(),
        "gamma": default_gamma(DRAFT.block_size),
        "objective": objective,
        "anchors": setting.anchors,
        "anchors_per": "sequence",
        "max_batch_size": 8,
        "token_budget": 8 * setting.max_length,
        "max_length": setting.max_length,
        "learning_rate": setting.learning_rate,
        "seed": seed,
        "threads": 1,
    }
    return {
        "config": config,
        "start": str(setting.output / "start"),
        "states": str(setting.states),
        "output": str(output),
        "cpu_seconds": setting.cpu_seconds,
        "snapshots": setting.snapshots,
    }


def run_trainer(script: str, job: Job) -> None:
    """Run trainers/`script`; a job that has ended well before is not run again."""
    output = Path(job["output"])
    path = output / "job.json"
    if (output / "ended").exists() and json.loads(path.read_text()) == job:
        return
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    path.write_text(json.dumps(job))
    peer = [str(install("specforge"))] if script == "specforge.py" else []
    # -P and the order of the path: SpecForge's process sees its own packages, not this project's dflash.
    settings = {"PYTHONPATH": os.pathsep.join([*peer, str(ROOT)]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (output / "train.log").open("w") as log:
        command = [sys.executable, "-P", "-W", "ignore", str(TRAINERS / script), str(path)]
        status = subprocess.run(command, env=os.environ | settings, stdout=log, stderr=log, check=False)
    if status.returncode:
        raise SystemExit(f"{script} ended with status {status.returncode}: see {output / 'train.log'}")
    (output / "ended").touch()


def measure(target: Target, cases: list[HeldOut], setting: Setting, runs: Path, name: str) -> list[dict[str, Any]]:
    """Return the curve of the trainer in `runs`/`name`: steps, CPU seconds and acceptance of each of its snapshots."""
    identity = rollout_settings(setting.target, setting.max_new_tokens, "float32")
    measured = Journal(runs / "measured.jsonl", identity, replace_other=True)
    stamps = [json.loads(line) for line in (runs / name / "stamps.jsonl").read_text().splitlines()]
    folders = [runs / name / "checkpoints" / f"step-{stamp['step']:08d}" / "draft" for stamp in stamps]
    start = {"step": 0, "cpu": 0.0, "wall": 0.0}
    return [
        {**start, **_acceptance(target, cases, setting.output / "start", measured, "start")},
        *(
            {**stamp, **_acceptance(target, cases, folder, measured, f"{name}/{stamp['step']}")}
            for stamp, folder in zip(stamps, folders, strict=True)
        ),
    ]


def _acceptance(target: Target, cases: list[HeldOut], folder: Path, measured: Journal, name: str) -> dict[str, Any]:
    draft = load_draft(folder)
    by_source: dict[str, list[Counts]] = {}
    for case in cases:
        key = f"{name} {case.prompt.key}"
        if key not in measured.records:
            found = count(case.answer, guess_everywhere(target, draft, case.answer, case.features))
            measured.add(key, found._asdict())
        counts = Counts(*(measured.records[key][field] for field in Counts._fields))
        by_source.setdefault(case.prompt.source, []).append(counts)
    return {
        **summarize([item for items in by_source.values() for item in items], DRAFT.block_size),
        "by_source": {source: summarize(items, DRAFT.block_size) for source, items in sorted(by_source.items())},
    }
