"""Masks over packed documents, teacher losses and D-PACE weights are those of vLLM's speculators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash.config import ObjectiveConfig
from dflash.mask import block_mask
from dflash.objective import Labels, chunked_block_loss, dpace_weights
from tests.parity.conftest import BLOCK_SIZE
from tests.parity.peers import ask

BLOCKS, VOCABULARY = 6, 23


def test_the_mask_of_packed_documents_is_the_same() -> None:
    documents = torch.tensor([0] * 7 + [1] * 2 + [2] * 9 + [-1] * 3)
    anchors = torch.tensor([0, 5, 6, 7, 9, 12, 13, 17])
    theirs = ask("speculators", "mask", {"documents": documents, "anchors": anchors}, block_size=BLOCK_SIZE)
    assert torch.equal(block_mask(documents, anchors, BLOCK_SIZE), theirs["mask"])


@pytest.fixture(scope="module")
def rows() -> dict[str, Tensor]:
    """Logits of drafter and target and weights for block slots; one row where the two hardly overlap."""
    generator = torch.Generator().manual_seed(8)
    draft, target = (2 * torch.randn(BLOCKS * BLOCK_SIZE, VOCABULARY, generator=generator) for _ in range(2))
    draft[7], target[7] = 0.0, 0.0
    draft[7, 3] = target[7, 4] = 30.0
    weights = torch.rand(BLOCKS, BLOCK_SIZE, generator=generator) + 0.1
    weights[:, 0] = 0.0
    weights[2, 3] = 0.0
    return {"draft": draft, "target": target, "weights": weights.flatten()}


@pytest.mark.parametrize("term", ["kl", "tv", "lk_alpha", "lk_lambda"])
def test_teacher_losses_and_their_gradients_are_the_same(rows: dict[str, Tensor], term: str) -> None:
    theirs = ask("speculators", "losses", rows)
    # With the unit matrix as the head, hidden states are logits; the teacher's state of a slot is one row before it.
    hidden = rows["draft"].view(BLOCKS, BLOCK_SIZE, VOCABULARY).clone().requires_grad_()
    weights = rows["weights"].view(BLOCKS, BLOCK_SIZE)
    slots = torch.arange(1, BLOCKS * BLOCK_SIZE + 1).view(BLOCKS, BLOCK_SIZE)
    labels = Labels(torch.zeros_like(slots), weights, slots)
    objective = ObjectiveConfig.model_validate({"ce": 0.0, term: 1.0})
    result = chunked_block_loss(hidden, torch.eye(VOCABULARY), labels, objective, 4, rows["target"])
    (gradient,) = torch.autograd.grad(result.loss * weights.sum(), hidden)
    torch.testing.assert_close(result.loss.detach() * weights.sum(), (theirs[term] * rows["weights"]).sum())
    torch.testing.assert_close(gradient.flatten(0, 1), theirs[f"{term}.gradient"], atol=1e-6, rtol=1e-4)


def test_dpace_weights_are_the_same(rows: dict[str, Tensor]) -> None:
    labelled = rows["weights"] > 0
    cross_entropy = rows["draft"].abs().sum(-1) / 10
    question = {"labelled": labelled.float(), "cross_entropy": cross_entropy}
    theirs = ask("speculators", "dpace", question, block_size=BLOCK_SIZE, alpha=0.4)
    ours = dpace_weights(cross_entropy.view(BLOCKS, BLOCK_SIZE), labelled.view(BLOCKS, BLOCK_SIZE), 0.4)
    torch.testing.assert_close(ours.flatten(), theirs["weights"])
