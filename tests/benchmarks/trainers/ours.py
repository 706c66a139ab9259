"""Trains with dflash's own `train` for a given CPU time: `ours.py JOB.json`; see `comparison.Job`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import dflash.features
from dflash.config import TrainingConfig
from dflash.train import train
from tests.benchmarks.trainers.states import final_key, key, read_states

# As many steps tell how many fit into the CPU time; the first ones, slower, are left out.
PROBE_STEPS, WARM_UP = 8, 3


def main(job: dict[str, Any]) -> None:
    output = Path(job["output"])
    states = read_states(Path(job["states"]))
    # The target's states come from the files that all trainers share.
    dflash.features.capture = lambda _target, ids, _layers: states[key(ids[0].numpy())][None]
    dflash.features.capture_with_final = lambda _target, ids, _layers: (
        states[key(ids[0].numpy())][None],
        states[final_key(ids[0].numpy())][None],
    )
    config = TrainingConfig.model_validate(job["config"] | {"output": output / "probe", "steps": PROBE_STEPS})
    stamps: dict[int, float] = {}
    train(config, lambda line: stamps.setdefault(line.get("step", 0), time.process_time()))
    each = (stamps[PROBE_STEPS] - stamps[WARM_UP]) / (PROBE_STEPS - WARM_UP)
    steps = max(int(job["cpu_seconds"] / each), job["snapshots"])
    every = steps // job["snapshots"]
    changes = {"output": output, "steps": every * job["snapshots"], "checkpoint_every": every, "keep": steps}
    start, wall = time.process_time(), time.monotonic()
    seen = {0}

    def stamp(line: dict[str, Any]) -> None:
        step = line.get("step", 0)
        if step % every == 0 and step not in seen:
            seen.add(step)
            with (output / "stamps.jsonl").open("a") as file:
                took = {"cpu": time.process_time() - start, "wall": time.monotonic() - wall}
                file.write(json.dumps({"step": step, **took}) + "\n")

    train(config.model_copy(update=changes), stamp)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(Path(sys.argv[1]).read_text()))
