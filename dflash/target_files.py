"""What can be known of a target from its folder, without loading it: its shape, and single tensors of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dflash.errors import DflashError
from dflash.target import TargetFit, decoder_layers, load_target


def weightless_target(path: Path) -> PreTrainedModel:
    """Return the decoder that `config.json` in `path` describes, on the meta device: shapes and no numbers.

    Raises DflashError when it is missing, or of no model that transformers knows.
    """
    if not (path / "config.json").is_file():
        raise DflashError(f"{path}: no target model here (config.json is missing)")
    try:
        text = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config(decoder=True)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(text)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        raise DflashError(
            f"{path}: not a causal language model's configuration ({' '.join(str(error).split())})"
        ) from error
    return model


def read_fit(path: Path) -> TargetFit:
    """Read what a drafter has to fit from the target's folder `path`: of its weights the embedding alone.

    A folder whose embedding is not found by its name in safetensors files is loaded whole, in bfloat16.

    Raises DflashError when the folder is missing or unreadable.
    """
    model = weightless_target(path)
    embedding: Any = model.get_input_embeddings()
    name = next((name for name, module in model.named_modules() if module is embedding), None)
    weight = None if name is None else _find(path, f"{name}.weight")
    if weight is None:
        return load_target(path, torch.bfloat16).fit
    return TargetFit(path, weight, len(decoder_layers(model, path)))


def _find(path: Path, name: str) -> Tensor | None:
    """Return the tensor `name` of the folder's files, under that name or inside a larger model; None where unclear."""
    own = ".".join(name.split(".")[-2:])
    exact, inside = [], []
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    if key == name:
                        exact.append((file, key))
                    elif key.endswith(f".{own}"):
                        inside.append((file, key))
        except (OSError, SafetensorError) as error:
            raise DflashError(f"{file}: not readable as safetensors ({error})") from error
    found = exact or inside
    if len(found) != 1:
        return None
    file, key = found[0]
    with safe_open(file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(key)
    return tensor
