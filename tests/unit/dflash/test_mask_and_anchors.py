"""What a block may see, where blocks start, and what they must predict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.anchors import sample_anchors, share_quota, valid_anchors
from dflash.mask import block_mask, decoding_mask, is_visible
from dflash.objective import block_labels


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_mask_element_follows_the_rule(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    documents = [i for i, length in enumerate(lengths) for _ in range(length)]
    documents += [-1] * data.draw(st.integers(0, 3))
    block_size = data.draw(st.integers(2, 4))
    anchors = data.draw(st.lists(st.integers(0, sum(lengths) - 1), min_size=1, max_size=5))
    window = data.draw(st.none() | st.integers(2, 7))
    mask = block_mask(torch.tensor(documents), torch.tensor(anchors), block_size, window)
    rows, keys = len(anchors) * block_size, len(documents) + len(anchors) * block_size
    expected = [[is_visible(q, k, documents, anchors, block_size, window) for k in range(keys)] for q in range(rows)]
    assert mask.tolist() == expected


def test_the_anchor_itself_and_other_documents_are_hidden() -> None:
    mask = block_mask(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([2, 4]), block_size=2)
    assert mask[0, :5].tolist() == [True, True, False, False, False]
    assert mask[2, :5].tolist() == [False, False, False, True, False]
    assert mask[0, 5:].tolist() == [True, True, False, False]


def test_a_row_of_a_sliding_layer_sees_itself_and_the_positions_before_it() -> None:
    mask = block_mask(torch.zeros(6, dtype=torch.long), torch.tensor([5]), block_size=3, window=3)
    # Positions 0 to 4 are the context, 5 to 7 the block: each row ends a stretch of three.
    assert mask.int().tolist() == [
        [0, 0, 0, 1, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("window", [None, 2, 4, 20])
def test_decoding_sees_what_training_sees(window: int | None) -> None:
    lengths, size = [1, 6, 3], 3
    decoding = decoding_mask(torch.tensor(lengths), size, window).expand(-1, -1, size, -1)
    for row, length in enumerate(lengths):
        trained = block_mask(torch.zeros(length + 1, dtype=torch.long), torch.tensor([length]), size, window)
        assert torch.equal(decoding[row, 0, :, :length], trained[:, :length])
        assert not decoding[row, 0, :, length : max(lengths)].any()
        assert torch.equal(decoding[row, 0, :, max(lengths) :], trained[:, length + 1 :])


def test_an_anchor_needs_its_own_and_the_next_position_supervised() -> None:
    assert valid_anchors(np.array([0, 1, 1, 0, 1, 0, 1, 1], dtype=np.int8)).tolist() == [1, 6]
    assert valid_anchors(np.array([1], dtype=np.int8)).tolist() == []


@given(total=st.integers(0, 40), available=st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_the_quota_uses_all_anchors_and_no_document_gets_less_than_a_longer_one_needs_to_give(
    total: int, available: list[int]
) -> None:
    quota = share_quota(total, available)
    assert sum(quota) == min(total, sum(available))
    assert all(q <= a for q, a in zip(quota, available, strict=True))
    # A document below its limit has at most one anchor less than any other.
    short = [q for q, a in zip(quota, available, strict=True) if q < a]
    assert all(q >= max(quota) - 1 for q in short)


def test_anchors_repeat_with_the_seed_and_change_without() -> None:
    masks = [np.ones(50, dtype=np.int8), np.ones(5, dtype=np.int8)]

    def draw(seed: int) -> list[list[int]]:
        chosen = sample_anchors(masks, per_pack=12, per_sequence=None, rng=np.random.default_rng(seed))
        return [positions.tolist() for positions in chosen]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert [len(positions) for positions in draw(1)] == [8, 4]
    assert all(positions == sorted(set(positions)) for positions in draw(1))


def test_anchors_per_sequence_are_a_limit_for_each_document() -> None:
    masks = [np.ones(50, dtype=np.int8), np.ones(5, dtype=np.int8)]
    chosen = sample_anchors(masks, per_pack=None, per_sequence=6, rng=np.random.default_rng(0))
    assert [len(positions) for positions in chosen] == [6, 4]


def test_labels_are_the_same_position_and_stay_in_the_document() -> None:
    ids = torch.tensor([10, 11, 12, 13, 20, 21, 22])
    mask = torch.tensor([0, 1, 1, 1, 1, 0, 1])
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    labels = block_labels(ids, mask, documents, torch.tensor([1, 2, 4]), block_size=4, gamma=2.0)
    assert labels.ids[0].tolist()[:3] == [11, 12, 13]
    decay = torch.exp(-torch.arange(3) / 2.0)
    # Block 0 would run into document 1 at its last slot; block 2 passes over an unsupervised position.
    expected = torch.stack(
        [
            torch.tensor([0.0, decay[0], decay[1], 0.0]),
            torch.tensor([0.0, decay[0], 0.0, 0.0]),
            torch.tensor([0.0, 0.0, decay[1], 0.0]),
        ]
    )
    torch.testing.assert_close(labels.weights, expected)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (32, 14.0), (4, 2.0)])
def test_gamma_defaults_to_the_papers_value_or_its_ratio(block_size: int, gamma: float) -> None:
    from dflash.config import default_gamma

    assert default_gamma(block_size) == pytest.approx(gamma)
