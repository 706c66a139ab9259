"""Prompts decoded in one batch get the tokens that each gets alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dflash.config import DraftConfig, Sampling
from dflash.decode import greedy_decode, sampled_decode, speculative_decode
from dflash.decode_batch import greedy_decode_batch, speculative_decode_batch
from dflash.errors import DflashError
from dflash.initialize import initialize
from dflash.mask import decoding_mask
from dflash.model import KeysValues
from dflash.ragged import causal_mask, stack_rows, write_rows
from dflash.sampling import Draws
from dflash.target import Target
from dflash.tree import tree_decode

DRAFT = DraftConfig(
    num_layers=2,
    block_size=4,
    mask_token_id=96,
    init="target",
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=9,
)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(2, 90, length).tolist() for length in lengths]


def test_a_batch_of_the_target_alone_equals_each_prompt_alone(target: Target) -> None:
    batch = prompts(3, 11, 6, 1, 20)
    alone = [greedy_decode(target, prompt, 30) for prompt in batch]
    for together, reference in zip(greedy_decode_batch(target, batch, 30), alone, strict=True):
        assert together.tokens == reference.tokens
        assert together.gaps == pytest.approx(reference.gaps, abs=1e-3)


def test_a_batch_verified_in_blocks_equals_each_prompt_alone(target: Target) -> None:
    draft = initialize(DRAFT, target, seed=0)
    batch = prompts(5, 2, 17, 9)
    alone = [speculative_decode(target, draft, prompt, 40) for prompt in batch]
    assert speculative_decode_batch(target, draft, batch, 40) == alone
    # Rejections and acceptances of unequal length happened, or the caches were not tried.
    assert len({tuple(output.acceptance_lengths) for output in alone}) > 1
    assert any(length > 1 for output in alone for length in output.acceptance_lengths)


def test_no_more_logits_exist_at_once_than_a_block_has(target: Target) -> None:
    draft = initialize(DRAFT, target, seed=0)
    prompt, *_ = prompts(50)
    rows: list[int] = []
    head: nn.Module = target.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    hook = head.register_forward_hook(lambda _module, _inputs, logits: rows.append(logits[..., 0].numel()))
    greedy_decode(target, prompt, 6)
    greedy_decode_batch(target, [prompt], 6)
    sampled_decode(target, prompt, 6, Sampling(1.0), Draws([[0]], target.device))
    speculative_decode(target, draft, prompt, 6)
    speculative_decode_batch(target, draft, [prompt], 6)
    tree_decode(target, draft, prompt, 6, 12)
    hook.remove()
    assert 1 <= max(rows) <= 13


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_short_answers_end_at_their_limit(target: Target, max_new_tokens: int) -> None:
    draft = initialize(DRAFT, target, seed=0)
    batch = prompts(4, 8)
    assert speculative_decode_batch(target, draft, batch, max_new_tokens) == [
        speculative_decode(target, draft, prompt, max_new_tokens) for prompt in batch
    ]


def test_an_empty_prompt_in_a_batch_is_refused(target: Target) -> None:
    with pytest.raises(DflashError, match="a prompt has no tokens"):
        greedy_decode_batch(target, [[5, 6], []], 4)


def test_documents_of_different_lengths_see_their_own_rows_only() -> None:
    lengths = torch.tensor([1, 3])
    assert causal_mask(lengths, 2).int().tolist() == [
        [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]],
        [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]],
    ]
    assert decoding_mask(lengths, 2).int().tolist() == [[[[1, 0, 0, 1, 1]]], [[[1, 1, 1, 1, 1]]]]


def test_rows_are_written_after_each_documents_own_and_over_rejected_ones() -> None:
    def document(*values: float) -> KeysValues:
        rows = torch.tensor(values).view(1, 1, -1, 1)
        return KeysValues(rows, -rows)

    buffers = stack_rows([document(1.0), document(2.0, 3.0, 4.0)], capacity=5)
    rows = torch.tensor([[7.0, 8.0], [9.0, 10.0]])[:, None, :, None]
    write_rows(buffers, KeysValues(rows, -rows), torch.tensor([1, 2]))
    assert buffers.keys.flatten(1).tolist() == [[1, 7, 8, 0, 0], [2, 3, 9, 10, 0]]
    assert torch.equal(buffers.values, -buffers.keys)
