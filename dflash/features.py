"""What training needs of the target for the documents of a pack, kept in memory for small runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dflash.data import Sample
from dflash.target import Target, capture, capture_with_final


class TargetStates(NamedTuple):
    """Features [tokens, taps * hidden] and, where a teacher is needed, last hidden states [tokens, hidden]; fp32."""

    features: Tensor
    final: Tensor | None


class FeatureSource:
    """Computes states and remembers up to `cache_bytes` of them: a document's states never change."""

    def __init__(self, target: Target, layer_ids: tuple[int, ...], cache_bytes: int, with_final: bool = False) -> None:
        self._target = target
        self._layer_ids = layer_ids
        self._free_bytes = cache_bytes
        self._with_final = with_final
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    def states(self, rows: list[int], samples: list[Sample]) -> TargetStates:
        """Return the states of `samples`, which are the dataset's `rows`, one after another."""
        tokens, end = sum(len(sample.input_ids) for sample in samples), 0
        joined: list[Tensor] = []
        # Each into its place: documents kept to be joined would be the pack's states a second time.
        for row, sample in zip(rows, samples, strict=True):
            document = self._document(row, sample)
            joined = joined or [part.new_empty(tokens, part.shape[1]) for part in document]
            first, end = end, end + len(sample.input_ids)
            for whole, part in zip(joined, document, strict=True):
                whole[first:end] = part
        return TargetStates(joined[0], joined[1] if self._with_final else None)

    def _document(self, row: int, sample: Sample) -> tuple[Tensor, ...]:
        if row in self._kept:
            return self._kept[row]
        # One document at a time: in a padded batch its last bits would depend on the others, and a resumed
        # run would drift from one that was never stopped.
        ids = torch.from_numpy(sample.input_ids)[None].to(self._target.device)
        found: tuple[Tensor, ...]
        if self._with_final:
            found = capture_with_final(self._target, ids, self._layer_ids)
        else:
            found = (capture(self._target, ids, self._layer_ids),)
        states = tuple(tensor[0].float() for tensor in found)
        size = sum(tensor.numel() * tensor.element_size() for tensor in states)
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._kept[row] = states
        return states
