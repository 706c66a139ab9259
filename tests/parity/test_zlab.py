"""The draft model, its configuration file and greedy decoding are those of z-lab's dflash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.architecture import build_target_layer_ids
from dflash.decode import DraftCache, block_hidden, greedy_decode, speculative_decode
from dflash.export import load_draft, write_draft
from dflash.model import DraftModel
from dflash.target import Target, capture
from dflash.train import train
from tests.parity.conftest import BLOCK_SIZE, LAYER_TYPES, SLIDING_WINDOW
from tests.parity.peers import ask
from tests.unit.dflash.conftest import MASK, training_config, write_dataset


@pytest.mark.parametrize("window", [3, SLIDING_WINDOW, 28, 60])
def test_a_block_after_its_context_gives_the_same_hidden_states(
    target: Target, draft: DraftModel, tmp_path: Path, window: int
) -> None:
    windowed = DraftModel(replace(draft.architecture, sliding_window=window))
    windowed.load_state_dict(draft.state_dict())
    write_draft(windowed, tmp_path, torch.float32)
    ids = torch.randint(2, 90, (1, 23), generator=torch.Generator().manual_seed(5))
    features = capture(target, ids, draft.architecture.target_layer_ids)
    block = torch.tensor([[17] + [MASK] * (BLOCK_SIZE - 1)])
    theirs = ask("zlab", "forward", {"features": features, "inputs": target.embedding(block)}, draft=str(tmp_path))
    cache = DraftCache(windowed)
    cache.append(features)
    torch.testing.assert_close(block_hidden(target, windowed, 17, cache), theirs["hidden"][0], atol=2e-5, rtol=1e-4)


def test_greedy_decoding_gives_the_same_tokens_and_acceptance_lengths(target: Target, tmp_path: Path) -> None:
    prompts = torch.randint(2, 90, (4, 9), generator=torch.Generator().manual_seed(6))
    # Half of the answers are learnt: some guesses are right and some are wrong.
    rows = [answered(target, prompt) for prompt in prompts[:2].tolist()]
    dataset = write_dataset(tmp_path / "data", rows)
    shape = {"num_layers": 2, "block_size": 4, "mask_token_id": MASK}
    shape |= {"layer_types": LAYER_TYPES, "sliding_window": 8}
    config = training_config(target.path, dataset, tmp_path / "run", steps=60, learning_rate=6e-3, draft=shape)
    trained = train(config).checkpoint
    theirs = ask(
        "zlab",
        "generate",
        {"prompts": prompts, "stop": torch.tensor(sorted(target.end_token_ids))},
        draft=str(trained / "draft"),
        target=str(target.path),
        max_new_tokens=32,
    )
    draft = load_draft(trained / "draft")
    lengths = []
    for row, prompt in enumerate(prompts.tolist()):
        ours = speculative_decode(target, draft, prompt, 32)
        assert ours.tokens == theirs[f"tokens.{row}"].tolist()
        assert ours.acceptance_lengths == theirs[f"lengths.{row}"].tolist()
        lengths += ours.acceptance_lengths
    assert len(set(lengths)) > 2, "blocks were accepted alike: comparing lengths says little"


def answered(target: Target, prompt: list[int]) -> dict[str, Any]:
    answer = greedy_decode(target, prompt, 32).tokens
    mask = [0] * len(prompt) + [1] * len(answer)
    return {"input_ids": prompt + answer, "loss_mask": mask, "seq_len": len(mask)}


def test_the_default_taps_are_the_same() -> None:
    pairs = [(layers, taps) for layers in (6, 12, 24, 30, 36, 48, 64) for taps in (1, 2, 3, 5, 8)]
    theirs = ask("zlab", "taps", {"pairs": torch.tensor(pairs)})
    for row, (layers, taps) in enumerate(pairs):
        assert list(build_target_layer_ids(layers, taps)) == theirs[str(row)].tolist()
