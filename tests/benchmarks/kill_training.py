"""A run of one target and one drafter, killed with -9 twenty times, ends as one that was never killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.dflash.conftest import random_rows, tiny_model, write_dataset
from tests.unit.dflash.kills import campaign
from tests.unit.dflash.ranks import run_ranks
from tests.unit.dflash.test_survival import SURVIVOR, assert_same_end, config_of

KILLS = 20
# Far more than the kills need: the run goes on until the kill comes, on a busy machine for many steps.
STEPS = 800


def test_twenty_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama", True).save_pretrained(tmp_path / "target")
    dataset = write_dataset(tmp_path / "data", random_rows(17))
    whole, killed = (
        config_of(tmp_path / "target", dataset, tmp_path / name, steps=STEPS, **SURVIVOR)
        for name in ("whole", "killed")
    )
    run_ranks(whole, tmp_path)
    for line in campaign(killed, KILLS, seed=0):
        with capsys.disabled():
            print(line, flush=True)  # noqa: T201
    assert_same_end(whole, killed)
    with capsys.disabled():
        print("weights and metrics are those of the run never killed, bit for bit")  # noqa: T201
