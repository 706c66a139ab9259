"""What an idle process of an image holds: resident memory on the host and, by NVML, memory on each card.

Read at each stage of a process that does nothing else: after importing, after opening a context on every device,
after running the kernels of a training step, and with a model after loading its weights.
"""

import json
import subprocess
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from services.errors import UserError
from services.stack.operate.engine import attempt, container_named, last_line
from services.stack.operate.gpus import read_cards, read_holders
from services.stack.operate.inside import script
from services.stack.operate.project import Role
from services.stack.operate.releases import Release

# Bytes by stage, by what holds them: "resident" or "card N".
Budget = Mapping[str, Mapping[str, int]]
# The stage at which a process has opened a context on every card.
OPENED = "context"
MODULES: dict[Role, str] = {
    "trainer": "torch,dflash.train",
    "sglang": "torch,sglang.srt.server_args",
    "tokenizer": "services.prompts.jobs,services.tokenizer.jobs",
    "producer": "services.producer.jobs",
}


def measure(release: Release, role: Role, gpus: bool, model: Path | None = None) -> Budget:
    """Measure a new process of an image, on every card when `gpus`.

    Raises:
        UserError: the process failed, with its own last line; or the driver does not tell what it holds.
    """
    name = f"dflash-footprint-{uuid.uuid4().hex[:8]}"
    command = ["docker", "run", "--interactive", "--rm", "--name", name, "--network", "none", "--read-only"]
    command += ["--tmpfs", "/tmp:exec", "--env", "HOME=/tmp", *(["--gpus", "all"] if gpus else [])]
    command += ["--volume", f"{model.absolute()}:/model:ro"] if model else []
    command += ["--entrypoint", "python", release.image, "-u", "-c", script("footprint"), MODULES[role]]
    command += ["model"] if model else []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            budget = _follow(process, name, gpus)
            status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            attempt("rm", "--force", name)
            raise
        errors.seek(0)
        if status != 0:
            said = last_line(errors.read()) or f"status {status}"
            raise UserError(f"image {release.reference}: its process for measuring failed: {said}")
    return budget


def over(before: Budget, after: Budget, margin: int) -> list[str]:
    """A line for each stage at which `after` holds over `margin` bytes more: on the cards, or resident without.

    So has a card for which there is nothing to compare with.
    """
    cards = sorted(name for name in after if name.startswith("card"))
    unknown = [card for card in cards if card not in before]
    lines = [f"{card}: nothing is recorded of the image in use, run `budget measure`" for card in unknown]
    return lines + [
        f"{holder} {stage}: {held / 1e6:,.0f} MB, {(held - before[holder][stage]) / 1e6:,.0f} MB more"
        for holder in cards or ["resident"]
        for stage, held in after[holder].items()
        if held - before.get(holder, {}).get(stage, held) > margin
    ]


def describe_budget(budget: Budget) -> str:
    """A budget in a line."""
    return "; ".join(
        f"{holder} " + ", ".join(f"{stage} {held / 1e6:,.0f} MB" for stage, held in stages.items())
        for holder, stages in budget.items()
    )


def _follow(process: subprocess.Popen[str], name: str, gpus: bool) -> Budget:
    if process.stdin is None or process.stdout is None:
        raise ValueError("the process has no pipes")
    budget: dict[str, dict[str, int]] = {"resident": {}}
    for line in process.stdout:
        if not line.startswith("{"):
            continue  # a library that prints
        told = json.loads(line)
        budget["resident"][told["stage"]] = told["resident"]
        for card, held in (_on_cards(name) if gpus else {}).items():
            budget.setdefault(f"card {card}", {})[told["stage"]] = held
        if gpus and told["stage"] == OPENED:
            _check_told(budget, name)
        _go_on(process.stdin)
    return budget


def _check_told(budget: Budget, name: str) -> None:
    """With a context open on every card, a process holds memory there: nothing means that the driver does not say."""
    if not any(stages[OPENED] for holder, stages in budget.items() if holder != "resident"):
        container = container_named(name)
        raise UserError(
            f"nvidia-smi names no memory of pid {container.pid if container else 0} on any card, and its contexts are "
            "open; measure as root on the host itself, with `nvidia-smi` showing processes"
        )


def _go_on(pipe: IO[str]) -> None:
    pipe.write("\n")
    pipe.flush()


def _on_cards(name: str) -> dict[str, int]:
    container = container_named(name)
    if container is None:
        return {}
    cards = read_cards()
    held = dict.fromkeys((card.index for card in cards), 0)
    for holder in read_holders(cards):
        if holder.pid == container.pid:
            held[holder.card] += holder.used
    return held
