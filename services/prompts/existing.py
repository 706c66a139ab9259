"""What the existing corpus holds already: its prompts as token ids (merge.base), and as text where it is there."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from services.errors import UserError
from services.settings import MergeSettings

BATCH_ROWS = 1000
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


class TokenizedPrompts:
    """Hashes of the tokenized prompts of a corpus, 8 bytes each: what stands before a sample's first reply."""

    def __init__(self, merge: MergeSettings) -> None:
        """Read the corpus that the run is merged with, or none.

        Raises:
            UserError: it is no dataset folder, or lacks a column for input_ids or loss_mask.
        """
        self.hashes: Hashes = np.zeros(0, np.uint64)
        if merge.base is not None:
            ids = merge.base_columns.get("input_ids", "input_ids")
            mask = merge.base_columns.get("loss_mask", "loss_mask")
            self.hashes = np.unique(np.fromiter(_prompt_hashes(merge.base, ids, mask), np.uint64))

    def has(self, input_ids: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
        if not len(self.hashes):
            return False
        hashed = np.uint64(_hash(input_ids))
        at = int(np.searchsorted(self.hashes, hashed))
        return at < len(self.hashes) and self.hashes[at] == hashed


def _prompt_hashes(base: Path, ids: str, mask: str) -> Iterator[int]:
    try:
        loaded = datasets.load_from_disk(str(base))
        if not isinstance(loaded, datasets.Dataset):
            raise ValueError("it holds several splits; name the folder of one of them")
        columns = loaded.select_columns([ids, mask]).with_format("arrow")
        batches = columns.iter(batch_size=BATCH_ROWS)
    except (OSError, ValueError) as error:
        raise UserError(f"existing corpus {base}: {' '.join(str(error).split())}; see merge.base") from error
    for batch in batches:
        for input_ids, loss_mask in zip(batch[ids], batch[mask], strict=True):
            supervised = loss_mask.values.to_numpy(zero_copy_only=False) == 1
            begin = int(np.argmax(supervised)) if len(supervised) else 0
            if begin:
                yield _hash(input_ids.values.slice(0, begin).to_numpy(zero_copy_only=False).astype(np.int32))


def _hash(input_ids: np.ndarray[Any, np.dtype[np.int32]]) -> int:
    return int.from_bytes(hashlib.blake2b(input_ids.tobytes(), digest_size=8).digest(), "little")
