"""The chunked objective is the plain one, in value and in gradient."""

from __future__ import annotations

import pytest
import torch

from dflash.objective import Labels, chunked_block_loss, reference_block_loss


@pytest.mark.parametrize("chunk_blocks", [1, 2, 5, 100])
def test_chunked_equals_the_reference(chunk_blocks: int) -> None:
    torch.manual_seed(3)
    hidden = torch.randn(5, 4, 16, requires_grad=True)
    head = torch.randn(31, 16)
    weights = torch.rand(5, 4) * (torch.rand(5, 4) > 0.3)
    weights[:, 0] = 0.0
    labels = Labels(torch.randint(0, 31, (5, 4)), weights)
    expected = reference_block_loss(hidden, head, labels)
    (expected_gradient,) = torch.autograd.grad(3.0 * expected.loss, hidden)
    actual = chunked_block_loss(hidden, head, labels, chunk_blocks)
    (gradient,) = torch.autograd.grad(3.0 * actual.loss, hidden)
    torch.testing.assert_close(actual.loss, expected.loss)
    torch.testing.assert_close(gradient, expected_gradient)
    torch.testing.assert_close(actual.cross_entropy, expected.cross_entropy)
    assert torch.equal(actual.correct, expected.correct)
    assert gradient[:, 0].abs().max() == 0


def test_no_more_logits_than_one_chunk_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    original = torch.Tensor.logsumexp

    def watch(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.shape[0])
        return original(tensor, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "logsumexp", watch)
    labels = Labels(torch.zeros(64, 4, dtype=torch.long), torch.ones(64, 4))
    labels.weights[:, 0] = 0
    chunked_block_loss(torch.randn(64, 4, 8), torch.randn(11, 8), labels, chunk_blocks=2)
    assert largest == 6
