"""That prompts are held out: none of them begins a sample of the training data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dflash.data import Dataset
from dflash.errors import DflashError
from dflash.rollouts import Prompt


def check_held_out(prompts: list[Prompt], dataset: Dataset, path: Path) -> None:
    """Raise DflashError when the target learnt to answer one of `prompts`, which come from `path`.

    A prompt is trained on where a sample's tokens begin with it and a supervised answer follows.
    """
    lengths = {len(prompt.input_ids) for prompt in prompts}
    known = {np.array(prompt.input_ids, dtype=np.int64).tobytes(): prompt.prompt_id for prompt in prompts}
    found: dict[str, int] = {}
    for row in range(len(dataset)):
        sample = dataset.sample(row)
        supervised = sample.loss_mask != 0
        starts = np.flatnonzero(supervised & ~np.concatenate(([False], supervised[:-1])))
        for start in starts.tolist():
            if start in lengths and (prompt_id := known.get(sample.input_ids[:start].tobytes())) is not None:
                found.setdefault(prompt_id, row)
    if found:
        prompt_id, row = next(iter(found.items()))
        raise DflashError(
            f"{path}: {len(found)} of {len(prompts)} prompts are in the training data {dataset.path}, for example "
            f"{prompt_id} in row {row}: measure acceptance on prompts that the drafter has not seen"
        )
