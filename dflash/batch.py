"""What a step trains on, made from the dataset alone: samples, anchors, and what the loss is divided by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash.anchors import sample_anchors
from dflash.config import TrainingConfig
from dflash.data import Dataset, Sample
from dflash.objective import LabelTotals
from dflash.packing import PackRows

# Keeps the draws of anchors apart from the draws of the shuffle, which share seed and epoch.
ANCHOR_STREAM = 1


class PackContent(NamedTuple):
    """The samples of one pack, and the anchors chosen in each."""

    rows: list[int]
    samples: list[Sample]
    anchors: list[NDArray[np.int64]]

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.input_ids) for sample in self.samples)


def read_samples(dataset: Dataset, pack: PackRows, config: TrainingConfig) -> list[Sample]:
    """Read the samples of a pack, cut to the longest length that is trained on."""
    return [dataset.sample(row, config.max_length) for row in pack.rows]


def read_pack(dataset: Dataset, pack: PackRows, config: TrainingConfig) -> PackContent:
    """Read a pack and choose its anchors, the same on whichever rank and after any restart."""
    rng = np.random.default_rng([config.seed, pack.epoch, pack.pack, ANCHOR_STREAM])
    samples = read_samples(dataset, pack, config)
    per_pack = config.anchors if config.anchors_per == "pack" else None
    per_sequence = config.anchors if config.anchors_per == "sequence" else None
    anchors = sample_anchors([sample.loss_mask for sample in samples], per_pack, per_sequence, rng)
    return PackContent(pack.rows, samples, anchors)


def count_totals(packs: list[PackContent], config: TrainingConfig) -> LabelTotals:
    """Return the totals of the labels of some packs, as `objective.block_labels` weighs them."""
    offsets = np.arange(1, config.draft.block_size)
    decay = np.exp(-(offsets - 1) / config.effective_gamma)
    total, blocks = 0.0, 0
    for pack in packs:
        for sample, anchors in zip(pack.samples, pack.anchors, strict=True):
            places = anchors[:, None] + offsets[None]
            inside = places < len(sample.loss_mask)
            labelled = inside & (sample.loss_mask[np.where(inside, places, 0)] != 0)
            total += float((labelled * decay).sum())
            blocks += int(labelled.any(-1).sum())
    return LabelTotals(total, float(blocks))
