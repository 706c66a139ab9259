"""Whoever holds a card is named, by process, and in a container by its name."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from services.errors import UserError
from services.stack.operate.gpus import not_free, read_cards, read_holders

Cards = Callable[[list[str], list[str]], None]
CARD = "{index}, GPU-{index}, RTX PRO 6000, 580.95.05, {used}, 97887"


def test_a_free_machine_has_nobody_to_name(cards: Cards) -> None:
    cards([CARD.format(index=0, used=2), CARD.format(index=1, used=15)], [])
    found = read_cards()
    assert [(card.index, card.used, card.driver) for card in found] == [
        ("0", 2 * 2**20, "580.95.05"),
        ("1", 15 * 2**20, "580.95.05"),
    ]
    assert not_free(found, read_holders(found)) == []


def test_a_process_that_holds_a_card_is_named_with_pid_and_mebibytes(cards: Cards) -> None:
    cards([CARD.format(index=0, used=2), CARD.format(index=6, used=61234)], [f"GPU-6, {os.getpid()}, 61220"])
    found = read_cards()
    (line,) = not_free(found, read_holders(found))
    command = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    assert line.startswith(f"card 6: pid {os.getpid()} ({command[:20]}")
    assert line.endswith("no container, holds 61,220 MiB")


def test_memory_that_no_process_answers_for_is_told(cards: Cards) -> None:
    cards([CARD.format(index=3, used=512)], [])
    found = read_cards()
    assert not_free(found, read_holders(found)) == ["card 3: 512 MiB are in use, and the driver names no process"]


def test_a_machine_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="there is no `nvidia-smi`: install NVIDIA's driver"):
        read_cards()
