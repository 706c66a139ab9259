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
        """Return [tokens, taps * hidden] for `samples`, which are the dataset's `rows`."""
        missing = [i for i, row in enumerate(rows) if row not in self._kept]
        fresh = dict(zip(missing, self._compute([samples[i] for i in missing]), strict=True))
        for i, features in fresh.items():
            size = features.numel() * features.element_size()
            if size <= self._free_bytes:
                self._free_bytes -= size
                self._kept[rows[i]] = features
        return torch.cat([fresh[i] if i in fresh else self._kept[row] for i, row in enumerate(rows)])

    def _compute(self, samples: list[Sample]) -> list[Tensor]:
        if not samples:
            return []
        ids = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(sample.input_ids) for sample in samples], batch_first=True
        )
        features = capture(self._target, ids.to(self._target.device), self._layer_ids)
        return [features[i, : len(sample.input_ids)].clone().float() for i, sample in enumerate(samples)]
