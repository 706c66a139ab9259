"""Kills a training run with -9 again and again: the launcher or a rank, at a step, both drawn by a seed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dflash.checkpoint import list_checkpoints
from dflash.config import TrainingConfig
from dflash.launch import LOST_PEER
from dflash.metrics import drop_lines_after

STEPS_BETWEEN = 6
PATIENCE = 300.0


def start(config: TrainingConfig) -> subprocess.Popen[str]:
    """Start `dflash train` on the run, which is to log its steps from the newest checkpoint on."""
    # What resuming does too; so none of the steps that one waits for is logged already.
    drop_lines_after(config.output / "metrics.jsonl", newest_step(config))
    path = config.output.with_suffix(".json")
    path.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "dflash", "train", "--config", str(path)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def ranks_of(launcher: int) -> list[int]:
    """The processes that the launcher has started."""
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def is_gone(process: int) -> bool:
    """Whether a process has ended; a zombie that nobody has waited for has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for_step(config: TrainingConfig, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until the run has logged `step`."""
    deadline = time.monotonic() + PATIENCE
    metrics = config.output / "metrics.jsonl"
    while not (metrics.exists() and f'{{"step": {step},' in metrics.read_text()):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_once(config: TrainingConfig, step: int, whom: int) -> str:
    """Start the run, kill -9 at `step` its rank `whom` (the launcher: -1), and return what the launcher said.

    Asserts that no process is left soon after, and that the launcher of a killed rank ends with one line.
    """
    process = start(config)
    wait_for_step(config, step, process)
    ranks = ranks_of(process.pid)
    assert len(ranks) == config.topology.processes
    os.kill(process.pid if whom < 0 else ranks[whom], signal.SIGKILL)
    _, said = process.communicate(timeout=PATIENCE)
    deadline = time.monotonic() + 10
    while not all(is_gone(rank) for rank in ranks):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.05)
    assert process.returncode == (-signal.SIGKILL if whom < 0 else LOST_PEER)
    return said.strip().splitlines()[-1] if said.strip() else ""


def newest_step(config: TrainingConfig) -> int:
    """The step of the newest checkpoint, 0 where there is none."""
    return max((int(path.name.removeprefix("step-")) for path in list_checkpoints(config.output)), default=0)


def campaign(config: TrainingConfig, kills: int, seed: int) -> Iterator[str]:
    """Kill the run `kills` times, let it come to its end, and yield a line for each kill."""
    rng = random.Random(seed)
    step = 0
    for number in range(1, kills + 1):
        step = min(max(step, newest_step(config)) + rng.randint(1, STEPS_BETWEEN), config.steps - 1)
        # A launcher and a rank at least, whatever is drawn for the rest.
        whom = {1: -1, 2: 0}.get(number, rng.randint(-1, config.topology.processes - 1))
        said = kill_once(config, step, whom)
        newest = list_checkpoints(config.output)[-1].name
        name = "launcher" if whom < 0 else f"rank {whom}"
        yield (f"kill {number:2}: {name} at step {step}, newest checkpoint {newest}: {said or 'silent'}")
    process = start(config)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
