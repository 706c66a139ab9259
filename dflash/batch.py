"""What a step trains on, made from the dataset alone: samples and anchors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash.anchors import sample_anchors
from dflash.config import TrainingConfig
from dflash.data import Dataset, Sample
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
