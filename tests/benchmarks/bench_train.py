"""`make bench-train`: the training step of dflash, SpecForge and speculators at the same shapes, paired on one machine.

Each implementation runs in an environment of its own, with the same torch, number of threads, drafter, vocabulary and
features. Steps are interleaved: one of each in turn, so that whatever else the machine does meets all alike. The floor
is the CPU time of the matrix products that a step cannot do without, at the rate of a large product in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.measure_step import BATCH, HEADS, HIDDEN, INNER, KV_HEADS, VOCABULARY

ROOT = Path(__file__).resolve().parents[2]
PYTHON = {
    "ours": ROOT / ".envs/trainer/bin/python",
    "specforge": ROOT / "var/peers/specforge/bin/python",
    "specforge_whole": ROOT / "var/peers/specforge/bin/python",
    "speculators": ROOT / "var/peers/speculators/bin/python",
}
SHAPES = ("512/2/16/64", "1024/2/16/64", "512/5/16/64")


class Runner:
    """A process that takes a step of one implementation whenever it is asked to."""

    def __init__(self, name: str, shape: str, threads: int) -> None:
        self.name = name
        settings = {
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        command = [PYTHON[name], "-W", "ignore", ROOT / "tests/benchmarks/measure_step.py", name, shape]
        self._process = subprocess.Popen(
            command, env=os.environ | settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"bench-train: {self.name} ended: its output is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self._process.communicate()


def floor_flop(shape: str) -> float:
    """Operations of the matrix products of one of our steps: forward, and backward by inputs and by weights."""
    sequence, layers, block, anchors = map(int, shape.split("/"))
    rows, tokens = BATCH * anchors * block, BATCH * sequence
    width = HIDDEN // HEADS
    by_row = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * width + 3 * HIDDEN * INNER
    by_token = layers * 2 * HIDDEN * KV_HEADS * width + layers * HIDDEN * HIDDEN
    # Two products with the head for each labelled row: the logits and the gradient by the row.
    head = 4 * HIDDEN * VOCABULARY * rows * (block - 1) / block
    # Scores and sums over the visible keys, a context of 5/8 of a document on average (its last three quarters have
    # the anchors), forward and twice that backward.
    attention = 3 * 4 * HIDDEN * (5 / 8 * sequence + block) * rows * layers
    return 6 * (rows * layers * by_row + tokens * by_token) + head + attention


def floor_bytes(parameters: int) -> float:
    """Bytes that a step has to move: weights thrice, gradients, AdamW's state, and the head once each way."""
    return parameters * 4 * (3 + 2 + 4) + 2 * 4 * HIDDEN * VOCABULARY


def product_rate() -> float:
    """Return operations a second of CPU time of the head's product with 1,024 rows."""
    rows, head = torch.randn(1024, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    begun = time.process_time()
    rows @ head.T
    return 2 * 1024 * HIDDEN * VOCABULARY / (time.process_time() - begun)


def measure(shape: str, names: list[str], rounds: int, threads: int) -> dict[str, Any]:
    """Measure one shape: the median of `rounds` steps of each implementation, taken in turn after one to warm up."""
    runners = [Runner(name, shape, threads) for name in names]
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    rates = []
    for number in range(rounds + 1):
        for runner in runners:
            found = runner.step()
            if number:
                steps[runner.name].append(found)
        rates.append(product_rate())
    for runner in runners:
        runner.end()
    sequence, _, block, anchors = map(int, shape.split("/"))
    results: dict[str, Any] = {"shape": shape, "product_flop_per_cpu_s": max(rates), "floor_flop": floor_flop(shape)}
    for name, found_steps in steps.items():
        seconds = statistics.median(step["seconds"] for step in found_steps)
        results[name] = {
            "seconds": seconds,
            "cpu_seconds": statistics.median(step["cpu"] for step in found_steps),
            "draft_rows_per_s": BATCH * anchors * block / seconds,
            "tokens_per_s": BATCH * sequence / seconds,
            "peak_bytes": max(step["peak"] for step in found_steps),
            "loss": found_steps[-1]["loss"],
        }
        if name != "ours":
            ratios = [a["seconds"] / b["seconds"] for a, b in zip(found_steps, steps["ours"], strict=True)]
            cpu = [a["cpu"] / b["cpu"] for a, b in zip(found_steps, steps["ours"], strict=True)]
            results[name] |= {"ratio": statistics.median(ratios), "cpu_ratio": statistics.median(cpu)}
    ours = steps["ours"][-1]
    results["floor_cpu_seconds"] = floor_flop(shape) / max(rates)
    results["floor_bytes"] = floor_bytes(ours["parameters"])
    return results


def main() -> None:
    """Print the table, and write the readings as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="sequence/layers/block/anchors, batch 2")
    parser.add_argument("--peers", nargs="+", default=["specforge", "specforge_whole", "speculators"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table("shape", "", "s", "draft rows/s", "tokens/s", "peak MiB", "times ours", "CPU times ours", "x floor")
    readings = []
    for shape in arguments.shapes:
        found = measure(shape, ["ours", *arguments.peers], arguments.rounds, arguments.threads)
        readings.append(found)
        for name in ("ours", *arguments.peers):
            one = found[name]
            table.add_row(
                shape,
                name,
                f"{one['seconds']:.2f}",
                f"{one['draft_rows_per_s']:.0f}",
                f"{one['tokens_per_s']:.0f}",
                f"{one['peak_bytes'] / 2**20:.0f}",
                f"{one.get('ratio', 1.0):.2f}",
                f"{one.get('cpu_ratio', 1.0):.2f}",
                f"{one['cpu_seconds'] / found['floor_cpu_seconds']:.2f}",
            )
    output = ROOT / "var/bench-train.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(readings, indent=2))
    Console(width=120).print(table)
    sys.stdout.write(f"{output}\n")


if __name__ == "__main__":
    main()
