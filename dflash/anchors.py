"""Choosing where training blocks start.

An anchor is a supervised position whose next position is supervised too, so that every block has a label. A
block may run past the end of its document; the labels there do not count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def valid_anchors(loss_mask: NDArray[np.int8]) -> NDArray[np.int64]:
    """Return the sorted positions t of one document with loss_mask[t] and loss_mask[t + 1]."""
    supervised = loss_mask != 0
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def share_quota(total: int, available: list[int]) -> list[int]:
    """Share `total` anchors among documents as evenly as their valid positions allow.

    Every document gets the same number; what a short one cannot use goes to the others. The sum is
    min(total, sum(available)).
    """
    quota = [0] * len(available)
    remaining = min(total, sum(available))
    for rank, index in enumerate(sorted(range(len(available)), key=lambda i: available[i])):
        quota[index] = min(available[index], remaining // (len(available) - rank))
        remaining -= quota[index]
    return quota


def sample_anchors(
    loss_masks: list[NDArray[np.int8]],
    per_pack: int | None,
    per_sequence: int | None,
    rng: np.random.Generator,
) -> list[NDArray[np.int64]]:
    """Draw anchors for the documents of one pack, uniformly and without replacement, sorted in each document.

    Args:
        loss_masks: one int8 [length] for each document.
        per_pack: how many for the whole pack, shared by `share_quota`; or
        per_sequence: how many at most for each document. Exactly one of the two is given.
        rng: the source of randomness; the same state gives the same anchors.
    """
    valid = [valid_anchors(mask) for mask in loss_masks]
    counts = [len(positions) for positions in valid]
    if per_pack is not None:
        quota = share_quota(per_pack, counts)
    else:
        quota = [min(per_sequence or 0, count) for count in counts]
    return [
        np.sort(rng.choice(positions, size=size, replace=False)) for positions, size in zip(valid, quota, strict=True)
    ]
