"""Which growth of an image's memory is too much."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from services.errors import UserError
from services.stack.operate.budget import measure, over
from services.stack.operate.releases import Release

Cards = Callable[[list[str], list[str]], None]

BEFORE = {"resident": {"import": 400_000_000, "kernels": 450_000_000}}


def test_growth_within_the_margin_is_let_pass() -> None:
    assert over(BEFORE, {"resident": {"import": 500_000_000, "kernels": 450_000_000}}, 100_000_000) == []


def test_growth_over_the_margin_is_told_by_stage() -> None:
    after = {"resident": {"import": 612_000_000, "kernels": 660_000_000}}
    assert over(BEFORE, after, 100_000_000) == [
        "resident import: 612 MB, 212 MB more",
        "resident kernels: 660 MB, 210 MB more",
    ]


def test_with_cards_it_is_each_cards_memory_that_counts() -> None:
    before = {"resident": {"import": 1}, "card 0": {"context": 300_000_000}, "card 1": {"context": 300_000_000}}
    after = {"resident": {"import": 10**9}, "card 0": {"context": 310_000_000}, "card 1": {"context": 500_000_000}}
    assert over(before, after, 100_000_000) == ["card 1 context: 500 MB, 200 MB more"]


def test_a_stage_that_was_not_measured_before_is_no_growth() -> None:
    assert over(BEFORE, {"resident": {"model": 10**12}}, 0) == []


def test_a_card_that_nothing_is_recorded_for_is_not_let_pass() -> None:
    before = {"resident": {"context": 1}, "card 0": {"context": 300_000_000}}
    after = {"resident": {"context": 1}, "card 0": {"context": 300_000_000}, "card 1": {"context": 900_000_000}}
    assert over(before, after, 100_000_000) == ["card 1: nothing is recorded of the image in use, run `budget measure`"]
    assert over({"resident": {"context": 1}}, after, 0) == [
        "card 0: nothing is recorded of the image in use, run `budget measure`",
        "card 1: nothing is recorded of the image in use, run `budget measure`",
    ]


def measuring(folder: Path, cards: Cards, process: str, ends: str = "") -> None:
    """A container of an image whose process tells of two stages, and ends as `ends` says; NVML names `process`."""
    cards(["0, GPU-0, RTX PRO 6000, 580.95.05, 900, 97887"], [process])
    state = {"Status": "running", "ExitCode": 0, "Pid": os.getpid()}
    container = {"Id": "1", "Name": "/c", "Config": {"Labels": {}}, "Image": "sha256:1", "State": state}
    stages = "".join(
        f"echo '{json.dumps({'stage': name, 'resident': 7})}'; read -r go\n" for name in ("import", "context")
    )
    script = folder / "bin" / "docker"
    script.write_text(
        f"#!/bin/sh\ncase \"$1\" in run) {stages}{ends} ;; inspect) echo '[{json.dumps(container)}]' ;; esac\n"
    )
    script.chmod(0o755)


def test_what_nvml_says_of_the_process_is_its_budget(tmp_path: Path, cards: Cards) -> None:
    measuring(tmp_path, cards, f"GPU-0, {os.getpid()}, 500")
    budget = measure(Release("sha256:1", "trainer:x"), "trainer", gpus=True)
    assert budget["card 0"] == {"import": 500 * 2**20, "context": 500 * 2**20}


@pytest.mark.parametrize("process", ["GPU-0, 1, 500", f"GPU-0, {os.getpid()}, [N/A]"])
def test_a_process_that_nvml_does_not_tell_of_is_not_said_to_hold_nothing(
    tmp_path: Path, cards: Cards, process: str
) -> None:
    measuring(tmp_path, cards, process)
    with pytest.raises(UserError, match=rf"nvidia-smi names no memory of pid {os.getpid()} on any card"):
        measure(Release("sha256:1", "trainer:x"), "trainer", gpus=True)


def test_a_process_that_is_killed_without_a_word_is_told_by_its_status(tmp_path: Path, cards: Cards) -> None:
    measuring(tmp_path, cards, f"GPU-0, {os.getpid()}, 500", "exit 137")
    with pytest.raises(UserError, match="its process for measuring failed: status 137"):
        measure(Release("sha256:1", "trainer:x"), "trainer", gpus=True)
