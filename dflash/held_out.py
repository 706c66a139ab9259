"""That prompts are held out: none of them begins a sample of the training data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash.data import Dataset
from dflash.errors import DflashError
from dflash.rollouts import Prompt


def check_held_out(prompts: list[Prompt], dataset: Dataset, path: Path) -> None:
    """Raise DflashError when the target learnt to answer one of `prompts`, which come from `path`.

    A prompt is trained on where a sample's tokens begin with it and a supervised answer follows.
    """
    lengths = np.array(sorted({len(prompt.input_ids) for prompt in prompts}))
    known = {np.array(prompt.input_ids, dtype=np.int64).tobytes(): prompt.prompt_id for prompt in prompts}
    found: dict[str, int] = {}
    first_row = 0
    for ids, masks in zip(dataset.input_ids, dataset.loss_masks, strict=True):
        tokens = ids.flatten().to_numpy(zero_copy_only=False)
        begins = np.concatenate(([0], np.cumsum(masks.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)))
        for row, start in _answers(masks, begins, lengths):
            prompt = tokens[begins[row] : begins[row] + start].astype(np.int64).tobytes()
            if prompt in known:
                found.setdefault(known[prompt], first_row + row)
        first_row += len(masks)
    if found:
        prompt_id, row = next(iter(found.items()))
        raise DflashError(
            f"{path}: {len(found)} of {len(prompts)} prompts are in the training data {dataset.path}, for example "
            f"{prompt_id} in row {row}: measure acceptance on prompts that the drafter has not seen"
        )


def _answers(masks: pa.Array, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield row and position of every supervised stretch that begins after one of `lengths` tokens of its row.

    No row is looped over but for these: a dataset has a million of them, and this runs as a training begins.
    """
    supervised = masks.flatten().to_numpy(zero_copy_only=False) != 0
    # A stretch that goes on from one row to the next begins its row, and there is no prompt without tokens.
    places = np.flatnonzero(supervised[1:] & ~supervised[:-1]) + 1
    rows = np.searchsorted(begins, places, side="right") - 1
    starts = places - begins[rows]
    wanted = np.isin(starts, lengths)
    yield from zip(rows[wanted].tolist(), starts[wanted].tolist(), strict=True)
