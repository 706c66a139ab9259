"""Which rank of a run counts as hung, by the beats of all."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash.config import TrainingConfig
from dflash.errors import DflashError
from dflash.launch import _Launcher
from dflash.parts import Part
from tests.unit.dflash.conftest import training_config

STALL = 100.0


@pytest.fixture
def config(tmp_path: Path) -> TrainingConfig:
    topology = {"targets": 1, "drafters": 1}
    return training_config(tmp_path, tmp_path, tmp_path, topology=topology, stall_seconds=STALL)


def check(config: TrainingConfig, beats: list[tuple[float, Part]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the launcher look at ranks that beat so many seconds ago, as they began such a part."""
    launcher, now = _Launcher(config, config.output / "ranks", lambda _line: None), time.monotonic()
    ranks: list[Any] = [SimpleNamespace(number=number, name=f"rank {number}") for number in range(len(beats))]
    for number, (ago, part) in enumerate(beats):
        monkeypatch.setattr(time, "monotonic", lambda ago=ago: now - ago)
        launcher._beats.beat(number, part)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    launcher._check_beats(ranks)


def test_who_waits_long_for_a_rank_that_goes_on_is_not_hung(
    config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(config, [(2 * STALL, "data_wait"), (1.0, "target_forward")], monkeypatch)


@pytest.mark.parametrize(
    ("beats", "hung"),
    [
        ([(2 * STALL, "data_wait"), (3 * STALL, "target_forward")], "rank 1"),
        ([(2 * STALL, "data_wait"), (3 * STALL, "data_wait")], "rank 0"),
        ([(1.0, "data_wait"), (2 * STALL, "target_forward")], "rank 1"),
    ],
)
def test_who_works_and_does_not_go_on_is_hung_and_so_are_all_that_wait_for_each_other(
    config: TrainingConfig, monkeypatch: pytest.MonkeyPatch, beats: list[tuple[float, Part]], hung: str
) -> None:
    with pytest.raises(DflashError, match=rf"{hung} has not gone on for 100 s \(stall_seconds\) in"):
        check(config, beats, monkeypatch)
