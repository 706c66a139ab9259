"""The target's features of every sample, computed once and shared by all trainers, in files of a few samples each."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

SAMPLES_A_FILE = 32


def key(input_ids: NDArray[np.int64]) -> str:
    """Name a sample's features by its tokens."""
    return hashlib.sha256(input_ids.astype(np.int64).tobytes()).hexdigest()


def read_states(folder: Path) -> dict[str, Tensor]:
    """Return the features [tokens, taps * hidden] (fp32) of every sample by `key`."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def make_states(target_folder: Path, samples: list[NDArray[np.int64]], taps: tuple[int, ...], folder: Path) -> None:
    """Compute what `folder` lacks."""
    from dflash.target import capture, load_target

    folder.mkdir(parents=True, exist_ok=True)
    known = read_states(folder).keys()
    missing = [ids for ids in samples if key(ids) not in known]
    if not missing:
        return
    target = load_target(target_folder, torch.float32)
    for first in range(0, len(missing), SAMPLES_A_FILE):
        part = missing[first : first + SAMPLES_A_FILE]
        states = {key(ids): capture(target, torch.from_numpy(ids)[None], taps)[0].clone() for ids in part}
        name = hashlib.sha256("".join(sorted(states)).encode()).hexdigest()[:16]
        save_file(states, folder / f".{name}.tmp")
        (folder / f".{name}.tmp").rename(folder / f"{name}.safetensors")
