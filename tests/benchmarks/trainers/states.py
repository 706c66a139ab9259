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
    """Return the features [tokens, taps * hidden] (fp32) of every sample by `key`, last states by `final_key`."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def final_key(input_ids: NDArray[np.int64]) -> str:
    """Name a sample's last hidden states."""
    return f"{key(input_ids)}.final"


def make_states(
    target_folder: Path, samples: list[NDArray[np.int64]], taps: tuple[int, ...], folder: Path, with_final: bool
) -> None:
    """Compute what `folder` lacks: features and, where a teacher is needed, last hidden states [tokens, hidden]."""
    from dflash.target import capture, capture_with_final, load_target

    folder.mkdir(parents=True, exist_ok=True)
    known = read_states(folder).keys()
    missing = [ids for ids in samples if key(ids) not in known]
    if not missing:
        return
    target = load_target(target_folder, torch.float32)
    for first in range(0, len(missing), SAMPLES_A_FILE):
        states: dict[str, Tensor] = {}
        for ids in missing[first : first + SAMPLES_A_FILE]:
            row = torch.from_numpy(ids)[None]
            if with_final:
                features, final = capture_with_final(target, row, taps)
                states[final_key(ids)] = final[0].clone()
            else:
                features = capture(target, row, taps)
            states[key(ids)] = features[0].clone()
        name = hashlib.sha256("".join(sorted(states)).encode()).hexdigest()[:16]
        save_file(states, folder / f".{name}.tmp")
        (folder / f".{name}.tmp").rename(folder / f"{name}.safetensors")
