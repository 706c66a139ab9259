"""What keeps the cards from being handed over is told before anything is stopped."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.errors import UserError
from services.stack.operate.phase import go_to_phase
from services.stack.operate.project import Project

Cards = Callable[[list[str], list[str]], None]
CARD = "{index}, GPU-{index}, RTX PRO 6000, {driver}, {used}, 97887"
DRIVER = "580.95.05"


def server(card: int) -> dict[str, Any]:
    device = {"driver": "nvidia", "device_ids": [str(card)], "capabilities": ["gpu"]}
    reserved = {"resources": {"reservations": {"devices": [device]}}}
    return {"image": "dflash-stack/sglang:release-1", "profiles": ["generate"], "deploy": reserved}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A stack for two cards."""
    (tmp_path / ".env").write_text("COMPOSE_PROFILES=train\n")
    return Project(tmp_path, tmp_path / ".env", "dflash-no-such", {"sglang-0": server(0), "sglang-1": server(1)})


def refused(project: Project, calls: Path) -> str:
    """Why generating cannot begin; .env is as it was, and Compose was asked for nothing."""
    with pytest.raises(UserError) as raised:
        go_to_phase(project, "generate", Console())
    assert project.env_file.read_text() == "COMPOSE_PROFILES=train\n"
    assert not [line for line in calls.read_text().splitlines() if line.startswith("compose")]
    return str(raised.value)


def test_a_machine_without_a_card(project: Project, cards: Cards, docker: Path) -> None:
    cards([], [])
    said = refused(project, docker)
    assert said == "nvidia-smi finds no card; with no GPU set COMPOSE_FILE=compose.cpu.yaml in .env"


def test_fewer_cards_than_the_stack_is_for(project: Project, cards: Cards, docker: Path) -> None:
    cards([CARD.format(index=0, driver=DRIVER, used=2)], [])
    said = refused(project, docker)
    assert said.startswith("card 1 is not in this machine, which has 1; `dflash-stack render --gpus 1")


def test_a_driver_that_is_too_old_for_the_images(project: Project, cards: Cards, docker: Path) -> None:
    cards([CARD.format(index=card, driver="570.86.15", used=2) for card in range(2)], [])
    assert refused(project, docker) == "driver 570.86.15 is too old: the images' CUDA needs 580; install driver 580"


def test_a_card_that_somebody_holds(project: Project, cards: Cards, docker: Path) -> None:
    rows = [CARD.format(index=card, driver=DRIVER, used=2 + 9000 * card) for card in range(2)]
    cards(rows, [f"GPU-1, {os.getpid()}, 8990"])
    said = refused(project, docker)
    assert said.startswith(f"phase generate: card 1: pid {os.getpid()} (")
    assert said.endswith("no container, holds 8,990 MiB; end it first. Nothing was changed")


def test_a_secret_or_a_folder_that_is_not_there(project: Project, cards: Cards, docker: Path) -> None:
    cards([CARD.format(index=card, driver=DRIVER, used=2) for card in range(2)], [])
    model, secret = project.folder / "model", project.folder / "redis_password"
    mounts = {
        "volumes": [{"type": "bind", "source": str(model)}, {"type": "volume", "source": "runs"}],
        "secrets": [{"source": "redis_password"}],
    }
    project = replace(project, services={"sglang-0": server(0) | mounts}, secrets={"redis_password": secret})
    said = refused(project, docker)
    assert said == f"{model} is not there, and sglang-0 needs it; `dflash-stack doctor` tells what to do"
    model.mkdir()
    assert refused(project, docker).startswith(f"{secret} is not there, and sglang-0 needs it")
