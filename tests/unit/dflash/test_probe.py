"""The split that `dflash probe` prints first is the one that does most packs a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.errors import DflashError
from dflash.probe import Rates, probe, splits
from tests.unit.dflash.conftest import training_config


def test_the_best_split_follows_from_the_rates() -> None:
    # Six targets make 0.91 packs/s, and two drafters would use 1.
    *apart, colocated = splits(Rates(target=6.6, gradient=1.5, optimizer=0.5), devices=8)
    assert len(apart) == 7
    assert apart[0] == (6, 2, 6 / 6.6, "drafters wait 9% of the time")
    assert (7, 1, 0.5, "targets wait 53% of the time") in apart
    assert colocated == (0, 8, 8 / 8.6, "where one device holds both")


def test_targets_of_several_cards_leave_fewer_to_the_drafters() -> None:
    found = splits(Rates(target=2.0, gradient=3.0, optimizer=0.5), devices=8, cards_per_target=3)
    assert [(split.targets, split.drafters) for split in found] == [(2, 2), (1, 5)]


def test_too_few_devices_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    config = training_config(tmp_path, tmp_path, tmp_path, topology={"targets": 1, "cards_per_target": 3})
    with pytest.raises(DflashError, match="3 devices: a target of 3 and a drafter need 4"):
        probe(config, devices=3, seconds=1)


def test_where_the_drafter_is_slow_it_gets_the_devices() -> None:
    assert splits(Rates(target=0.5, gradient=3.0, optimizer=0.5), devices=8)[0][:2] == (1, 7)
