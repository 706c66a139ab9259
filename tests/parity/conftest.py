"""Targets and drafters of random weights, norms included: a norm left out or taken twice changes the result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash.architecture import LayerType
from dflash.config import DraftConfig
from dflash.export import write_draft
from dflash.initialize import initialize
from dflash.model import DraftModel
from dflash.target import Target, load_target
from tests.unit.dflash.conftest import MASK, tiny_model

BLOCK_SIZE = 5
# Both kinds of layers at once, and a window that is shorter than the documents and longer than a block.
LAYER_TYPES: tuple[LayerType, ...] = ("sliding_attention", "full_attention")
SLIDING_WINDOW = 7


@pytest.fixture(scope="session", params=[("llama", True), ("qwen3", False)], ids=["llama-tied", "qwen3-untied"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    family, tied = request.param
    folder = Path(tmp_path_factory.mktemp(family))
    tiny_model(family, tied).save_pretrained(folder)
    return load_target(folder, torch.float32)


def random_draft(target: Target, seed: int = 0) -> DraftModel:
    config = DraftConfig(
        num_layers=2,
        block_size=BLOCK_SIZE,
        target_layer_ids=(3, 0, 2),
        mask_token_id=MASK,
        layer_types=LAYER_TYPES,
        sliding_window=SLIDING_WINDOW,
    )
    draft = initialize(config, target, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))
    return draft


@pytest.fixture(scope="session")
def draft(target: Target) -> DraftModel:
    return random_draft(target)


@pytest.fixture(scope="session")
def draft_folder(draft: DraftModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("draft"))
    write_draft(draft, folder, torch.float32)
    return folder
