"""What a rank says of its memory; a machine with cards is what torch tells of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.founding import own_devices
from dflash.parts import Clock
from dflash.plan import check_memory, memory_parts, read_target_shape
from dflash.rank_metrics import RankMetrics
from dflash.world import World
from tests.unit.dflash.conftest import training_config

GB = 10**9
TOPOLOGY = {"targets": 1, "drafters": 1, "cards_per_target": 2}


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cards of 96 GB: on each, torch has reserved 10 GB and its context takes 0.5, on the last one 0.7."""
    contexts = {"cuda:0": 500_000_000, "cuda:1": 500_000_000, "cuda:2": 700_000_000}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (86 * GB - contexts[card], 96 * GB))
    for name, held in {"memory_reserved": 10, "memory_allocated": 8, "max_memory_allocated": 9}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _card, held=held: held * GB)


def memory_of(rank: int, target: Path, output: Path, **changes: Any) -> dict[str, float]:
    """Return what a rank writes of its memory on cards, by kind."""
    config = training_config(target, output, output, device="cuda", topology=TOPOLOGY, **changes)
    world = World(rank, targets=1, drafters=1)
    planned = check_memory(config, world.role, own_devices(config, rank))
    RankMetrics(config, world, Clock(), planned).write()
    lines = (output / "metrics" / f"rank-{rank}.prom").read_text().splitlines()
    found = [line for line in lines if line.startswith("dflash_training_memory_bytes{")]
    kinds = {line.split('kind="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in found}
    return {kind: value for kind, value in kinds.items() if kind != "resident"}


def test_a_rank_writes_what_it_holds_and_what_was_planned(cards: None, llama_folder: Path, tmp_path: Path) -> None:
    config = training_config(llama_folder, tmp_path, tmp_path, device="cuda", topology=TOPOLOGY)
    planned = sum(memory_parts("drafter", config, read_target_shape(llama_folder), 0).values())
    held = {"allocated": 8.0 * GB, "reserved": 10.0 * GB, "peak": 9.0 * GB, "context": 0.5 * GB}
    assert memory_of(0, llama_folder, tmp_path) == held | {"planned": planned + 0.5 * GB}
    measured = {"baseline_bytes": 600_000_000}
    assert memory_of(0, llama_folder, tmp_path, memory=measured)["planned"] == planned + 0.6 * GB


def test_a_target_s_cards_are_added_up(cards: None, llama_folder: Path, tmp_path: Path) -> None:
    config = training_config(llama_folder, tmp_path, tmp_path, device="cuda", topology=TOPOLOGY)
    shape = read_target_shape(llama_folder)
    planned = sum(sum(memory_parts("target", config, shape, 0, card).values()) for card in (0, 1))
    held = {"allocated": 16.0 * GB, "reserved": 20.0 * GB, "peak": 18.0 * GB, "context": 0.7 * GB}
    assert memory_of(1, llama_folder, tmp_path) == held | {"planned": planned + 0.7 * GB}


def test_without_a_card_only_the_process_is_told(llama_folder: Path, tmp_path: Path) -> None:
    config = training_config(llama_folder, tmp_path, tmp_path)
    RankMetrics(config, World(), Clock(), check_memory(config, "colocated", ["cpu"])).write()
    text = (tmp_path / "metrics" / "rank-0.prom").read_text()
    assert 'kind="resident"' in text
    assert text.count("dflash_training_memory_bytes{") == 1
