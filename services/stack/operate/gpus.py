"""The cards, as NVML tells of them through `nvidia-smi`: who holds memory on which."""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from services.errors import UserError
from services.stack.operate.engine import container_named, last_line

# What a driver keeps for itself on a card that nobody uses.
IDLE_BYTES = 100 * 2**20
# The first driver branch that runs each CUDA version (NVIDIA's compatibility table), by variant of our images.
DRIVERS = {"cu128": 570, "cu130": 580}
CONTAINER_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Card:
    """A card: its index, its uuid, bytes in use of bytes in all."""

    index: str
    uuid: str
    name: str
    driver: str
    used: int
    total: int


@dataclass(frozen=True)
class Holder:
    """A process that holds memory on a card; `container` is the name of the one that it runs in, if any."""

    card: str
    pid: int
    used: int
    command: str
    container: str | None

    def __str__(self) -> str:
        where = f"container {self.container}" if self.container else "no container"
        return f"card {self.card}: pid {self.pid} ({self.command}), {where}, holds {self.used / 2**20:,.0f} MiB"


def read_cards() -> list[Card]:
    """Every card of this machine.

    Raises:
        UserError: there is no driver, or it does not answer.
    """
    rows = _query("--query-gpu=index,uuid,name,driver_version,memory.used,memory.total")
    return [Card(row[0], row[1], row[2], row[3], _bytes(row[4]), _bytes(row[5])) for row in rows]


def read_holders(cards: list[Card]) -> list[Holder]:
    """Every process with memory on one of the cards."""
    index = {card.uuid: card.index for card in cards}
    rows = _query("--query-compute-apps=gpu_uuid,pid,used_memory")
    return [_holder(index[row[0]], int(row[1]), _bytes(row[2])) for row in rows if row[0] in index]


def missing_cards(asked: Iterable[str], cards: list[Card]) -> list[str]:
    """Those of the asked cards, by index or uuid, that are not in this machine."""
    there = {name for card in cards for name in (card.index, card.uuid)}
    return sorted(set(asked) - there, key=lambda name: (len(name), name))


def not_free(cards: list[Card], holders: list[Holder]) -> list[str]:
    """A line for each holder of a card, and for each card with memory in use that no process answers for."""
    lines = [str(holder) for holder in holders]
    held = {holder.card for holder in holders}
    return lines + [
        f"card {card.index}: {card.used / 2**20:,.0f} MiB are in use, and the driver names no process"
        for card in cards
        if card.index not in held and card.used > IDLE_BYTES
    ]


def driver_version() -> str:
    """The driver's version."""
    cards = read_cards()
    if not cards:
        raise UserError("nvidia-smi finds no card; is one built in, and the driver loaded? `nvidia-smi`")
    return cards[0].driver


def older_than_needed(driver: str, variants: Iterable[str]) -> int | None:
    """The driver branch that images of these variants (cu130, cu130-0.5.12 ...) need, when `driver` is an older one."""
    needed = max((DRIVERS.get(variant.partition("-")[0], 0) for variant in variants), default=0)
    return needed if int(driver.partition(".")[0]) < needed else None


def _holder(card: str, pid: int, used: int) -> Holder:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return Holder(card, pid, used, "gone", None)
    container = container_named(match[0]) if (match := CONTAINER_ID.search(groups)) else None
    return Holder(card, pid, used, command[:80], container.name if container else None)


def _query(question: str) -> list[list[str]]:
    command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError(
            "there is no `nvidia-smi`: install NVIDIA's driver; with no GPU use compose.cpu.yaml"
        ) from error
    if finished.returncode != 0:
        said = last_line(finished.stdout) or last_line(finished.stderr) or finished.returncode
        raise UserError(f"nvidia-smi: {said}; the driver has to answer first")
    return [[part.strip() for part in line.split(",")] for line in finished.stdout.splitlines() if line.strip()]


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) * 2**20 if mebibytes.isdigit() else 0
