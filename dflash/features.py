"""The target's features for the documents of a pack, kept in memory for small runs."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.data import Sample
from dflash.target import Target, capture


class FeatureSource:
    """Computes features and remembers up to `cache_bytes` of them: a document's features never change."""

    def __init__(self, target: Target, layer_ids: tuple[int, ...], cache_bytes: int) -> None:
        self._target = target
        self._layer_ids = layer_ids
        self._free_bytes = cache_bytes
        self._kept: dict[int, Tensor] = {}

    def features(self, rows: list[int], samples: list[Sample]) -> Tensor:
        """Return [tokens, taps * hidden] (fp32) for `samples`, which are the dataset's `rows`."""
        return torch.cat([self._document(row, sample) for row, sample in zip(rows, samples, strict=True)])

    def _document(self, row: int, sample: Sample) -> Tensor:
        if row in self._kept:
            return self._kept[row]
        # One document at a time: in a padded batch its last bits would depend on the others, and a resumed
        # run would drift from one that was never stopped.
        ids = torch.from_numpy(sample.input_ids)[None].to(self._target.device)
        features = capture(self._target, ids, self._layer_ids)[0].float()
        size = features.numel() * features.element_size()
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._kept[row] = features
        return features
