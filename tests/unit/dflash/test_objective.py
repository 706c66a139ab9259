"""The chunked objective is the plain one, in value and in gradient, for every term and for their sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dflash.objective as objective_module
from dflash.config import ObjectiveConfig
from dflash.objective import TERMS, Labels, chunked_block_loss, reference_block_loss

BLOCKS, SLOTS, WIDTH, VOCABULARY = 5, 4, 16, 31
ONE_TERM = [{"ce": 0.0} | {name: 1.0} for name in TERMS]
MIXED = {"ce": 0.3, "dpace": 0.5, "kl": 0.2, "tv": 1.1, "lk_alpha": 0.7, "lk_lambda": 0.4}


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Labels, Tensor]:
    """Hidden states, head, labels and the target's states of a pack of 12 tokens."""
    torch.manual_seed(3)
    weights = torch.rand(BLOCKS, SLOTS) * (torch.rand(BLOCKS, SLOTS) > 0.3)
    weights[:, 0] = 0.0
    weights[3] = 0.0  # a block without a label
    rows = torch.randint(1, 12, (BLOCKS, SLOTS))
    labels = Labels(torch.randint(0, VOCABULARY, (BLOCKS, SLOTS)), weights, rows)
    hidden = torch.randn(BLOCKS, SLOTS, WIDTH, requires_grad=True)
    return hidden, torch.randn(VOCABULARY, WIDTH) * 0.5, labels, torch.randn(12, WIDTH)


@pytest.mark.parametrize("chunk_blocks", [1, 2, 100])
@pytest.mark.parametrize("terms", [*ONE_TERM, MIXED], ids=[*TERMS, "mixed"])
def test_chunked_equals_the_reference(
    case: tuple[Tensor, Tensor, Labels, Tensor], terms: dict[str, float], chunk_blocks: int
) -> None:
    hidden, head, labels, teacher = case
    objective = ObjectiveConfig.model_validate(terms)
    expected = reference_block_loss(hidden, head, labels, objective, teacher)
    (expected_gradient,) = torch.autograd.grad(3.0 * expected.loss, hidden)
    actual = chunked_block_loss(hidden, head, labels, objective, chunk_blocks, teacher)
    (gradient,) = torch.autograd.grad(3.0 * actual.loss, hidden)
    torch.testing.assert_close(actual.loss, expected.loss)
    torch.testing.assert_close(actual.terms, expected.terms)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-4)
    assert torch.equal(actual.correct, expected.correct)
    assert gradient[:, 0].abs().max() == 0


def test_the_loss_is_the_weighted_sum_of_its_terms(case: tuple[Tensor, Tensor, Labels, Tensor]) -> None:
    hidden, head, labels, teacher = case
    result = chunked_block_loss(hidden, head, labels, ObjectiveConfig.model_validate(MIXED), 2, teacher)
    assert result.terms.keys() == MIXED.keys()
    assert float(result.loss.detach()) == pytest.approx(sum(MIXED[name] * float(result.terms[name]) for name in MIXED))


def test_lk_alpha_of_a_certain_target_is_the_cross_entropy(case: tuple[Tensor, Tensor, Labels, Tensor]) -> None:
    hidden, _, labels, _ = case
    head = torch.eye(VOCABULARY, WIDTH)
    slots = torch.arange(1, BLOCKS * SLOTS + 1).view(BLOCKS, SLOTS)
    labels = labels._replace(ids=labels.ids % WIDTH, rows=slots)
    teacher = torch.zeros(BLOCKS * SLOTS, WIDTH)
    teacher[torch.arange(BLOCKS * SLOTS), labels.ids.flatten()] = 200.0
    lk = chunked_block_loss(hidden, head, labels, ObjectiveConfig(ce=0, lk_alpha=1), 2, teacher)
    plain = chunked_block_loss(hidden, head, labels, ObjectiveConfig(), 2)
    torch.testing.assert_close(lk.loss, plain.loss)


def test_the_head_gets_no_gradient(case: tuple[Tensor, Tensor, Labels, Tensor]) -> None:
    hidden, head, labels, _ = case
    head.requires_grad_()
    chunked_block_loss(hidden, head, labels, ObjectiveConfig(), 2).loss.backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_no_more_logits_than_one_chunk_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    original = objective_module._softmax_in_place

    def watch(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal largest
        largest = max(largest, logits.untyped_storage().nbytes() // (4 * logits.shape[1]))
        return original(logits, ids)

    monkeypatch.setattr(objective_module, "_softmax_in_place", watch)
    labels = Labels(torch.zeros(64, 4, dtype=torch.long), torch.ones(64, 4), torch.ones(64, 4, dtype=torch.long))
    labels.weights[:, 0] = 0
    chunked_block_loss(torch.randn(64, 4, 8), torch.randn(11, 8), labels, ObjectiveConfig(), chunk_blocks=2)
    assert largest == 6


def test_an_almost_impossible_label_has_a_finite_loss_and_gradient() -> None:
    hidden = torch.full((1, 2, 1), 1.0, requires_grad=True)
    head = torch.tensor([[200.0], [0.0], [199.0]])
    labels = Labels(torch.tensor([[0, 1]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[1, 2]]))
    result = chunked_block_loss(hidden, head, labels, ObjectiveConfig(), 1)
    expected = reference_block_loss(hidden, head, labels, ObjectiveConfig())
    torch.testing.assert_close(result.loss, expected.loss)
    (gradient,) = torch.autograd.grad(result.loss, hidden)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.loss, hidden)[0])
