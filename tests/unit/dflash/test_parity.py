"""Training and decoding give the same rows for the same block, and every token is the target's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from dflash.config import DraftConfig
from dflash.data import Sample
from dflash.decode import (
    DraftCache,
    block_hidden,
    count_accepted,
    greedy_decode,
    new_cache,
    speculative_decode,
)
from dflash.errors import DflashError
from dflash.forward import forward_blocks
from dflash.initialize import initialize
from dflash.pack import build_pack
from dflash.target import Target, capture, wrap_target

DRAFT = DraftConfig(num_layers=2, block_size=5, mask_token_id=96)
# A window that is shorter than the context of most blocks, and longer than that of a few.
SLIDING = DraftConfig.model_validate(
    DRAFT.model_dump() | {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 7}
)


@pytest.mark.parametrize("config", [DRAFT, SLIDING], ids=["full", "sliding"])
def test_training_forward_equals_cached_inference_forward(target: Target, config: DraftConfig) -> None:
    draft = initialize(config, target, seed=0)
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(2, 90, n), np.ones(n, dtype=np.int8)) for n in (13, 9, 17)]
    anchors = [np.array([0, 3, 4, 11]), np.array([7]), np.array([1, 16])]
    pack = build_pack(samples, anchors, torch.device("cpu"))
    taps = draft.architecture.target_layer_ids
    features = torch.cat([capture(target, torch.from_numpy(s.input_ids)[None], taps)[0] for s in samples])
    with torch.no_grad():
        trained = forward_blocks(draft, target, pack, features)
    block = 0
    for sample, positions in zip(samples, anchors, strict=True):
        for anchor in positions.tolist():
            ids = torch.from_numpy(sample.input_ids)[None]
            context = capture(target, ids, taps)[:, :anchor]
            cache = DraftCache(draft)
            # Features come in two portions, as when decoding: the prompt first, verified tokens later.
            cache.append(context[:, : anchor // 2])
            cache.append(context[:, anchor // 2 :])
            served = block_hidden(target, draft, int(sample.input_ids[anchor]), cache)
            torch.testing.assert_close(trained[block], served, atol=2e-5, rtol=1e-4)
            block += 1


@pytest.mark.parametrize("init", ["random", "target"])
def test_speculative_tokens_are_the_targets_own(target: Target, init: str) -> None:
    config = DraftConfig.model_validate(DRAFT.model_dump() | {"init": init})
    draft = initialize(config, target, seed=0)
    for seed in range(2):
        prompt = np.random.default_rng(seed).integers(2, 90, 6).tolist()
        alone = greedy_decode(target, prompt, 24)
        together = speculative_decode(target, draft, prompt, 24)
        assert together.tokens == alone.tokens
        assert len(together.tokens) == 1 + sum(together.acceptance_lengths)


def test_guesses_are_accepted_up_to_the_first_wrong_one() -> None:
    assert count_accepted([9, 1, 2, 3], [1, 2, 3, 4]) == 3
    assert count_accepted([9, 1, 5, 3], [1, 2, 3, 4]) == 1
    assert count_accepted([9, 7, 2, 3], [1, 2, 3, 4]) == 0


def test_a_target_whose_cache_cannot_forget_is_refused() -> None:
    config = Qwen3NextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    model = Qwen3NextForCausalLM(config)  # type: ignore[no-untyped-call]
    target = wrap_target(model, Path("hybrid"))
    with pytest.raises(DflashError, match=r"hybrid: cannot be verified in blocks.*LinearAttention"):
        new_cache(target)


def test_an_empty_prompt_is_refused(target: Target) -> None:
    with pytest.raises(DflashError, match="no tokens"):
        greedy_decode(target, [], 4)
