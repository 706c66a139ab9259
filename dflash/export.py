"""Drafter folders: `config.json` and `model.safetensors`, as SGLang and z-lab's dflash load them.

SGLang ignores tensors it does not know and does not miss absent ones, so names and shapes are checked here,
on writing and on reading.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dflash.architecture import (
    Architecture,
    check_target_layer_ids,
    read_architecture,
    tensor_shapes,
    to_config_json,
)
from dflash.errors import DflashError
from dflash.files import publish_folder, read_json, write_json
from dflash.metrics import ACCEPTANCE_CURVE, best_step
from dflash.model import DraftModel
from dflash.target import TargetFit, check_mask_token

WEIGHTS = "model.safetensors"


def write_draft(model: DraftModel, folder: Path, dtype: torch.dtype) -> None:
    """Write the drafter into `folder`. Raises DflashError when its tensors are not exactly the layout's."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    check_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, model.architecture, str(folder))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / "config.json", to_config_json(model.architecture, str(dtype).removeprefix("torch.")))


def load_draft(folder: Path, device: str = "cpu") -> DraftModel:
    """Load a drafter folder in float32. Raises DflashError for a wrong setting, tensor name or shape."""
    architecture = read_architecture(folder)
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DflashError(f"{path}: not readable as safetensors ({error})") from error
    check_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, architecture, str(path))
    with torch.device("meta"):
        model = DraftModel(architecture)
    model.load_state_dict(tensors, assign=True)
    return model.to(device)


def check_tensors(found: dict[str, tuple[int, ...]], architecture: Architecture, where: str) -> None:
    """Raise DflashError unless `found`, which comes from `where`, is exactly what `architecture` needs."""
    expected = tensor_shapes(architecture)
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} does not belong" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {found[name]} instead of {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if problems:
        more = f" and {len(problems) - 3} more problems" if len(problems) > 3 else ""
        raise DflashError(f"{where}: not a drafter of this configuration: {'; '.join(problems[:3])}{more}")


def check_pair(architecture: Architecture, target: TargetFit, where: str) -> None:
    """Raise DflashError unless the drafter fits `target`: width, vocabulary, taps and mask token."""
    rows, width = target.embedding.shape
    pairs = (
        ("hidden_size", architecture.hidden_size, width),
        ("vocab_size", architecture.vocab_size, rows),
        ("num_target_layers", architecture.num_target_layers, target.layers),
    )
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise DflashError(f"{where}: made for another target: {name} {ours}, but {target.path} has {theirs}")
    check_target_layer_ids(architecture.target_layer_ids, target.layers)
    check_mask_token(target, architecture.mask_token_id)


def export_draft(source: Path, output: Path, target: TargetFit, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Publish the drafter of `source` (a run, a checkpoint or a drafter folder) at `output` and read it back.

    Raises DflashError when it does not fit the target, or a weight is not finite in `dtype`.
    """
    draft_folder = find_draft(source)
    model = load_draft(draft_folder)
    check_pair(model.architecture, target, str(draft_folder))
    for name, tensor in model.state_dict().items():
        if not tensor.to(dtype).isfinite().all():
            raise DflashError(f"{draft_folder}: {name} has values that are not finite in {dtype}")
    with publish_folder(output) as folder:
        write_draft(model, folder, dtype)
        written = load_draft(folder)
        for name, tensor in model.state_dict().items():
            if not torch.equal(written.state_dict()[name], tensor.to(dtype).float()):
                raise DflashError(f"{output}: {name} reads back differently from what was written")
    return output


def find_draft(source: Path) -> Path:
    """Return the drafter folder of `source`: itself, a checkpoint's, or that of a run's best checkpoint.

    The best is that of the highest acceptance length. It is the newest of a run that did not measure acceptance, or
    was killed before the best was saved.
    """
    checkpoints = sorted((source / "checkpoints").glob("step-*"))
    best = best_step(source / ACCEPTANCE_CURVE)
    chosen = [*(c for c in checkpoints if best is not None and c.name == f"step-{best:08d}"), *checkpoints[-1:]]
    for folder in (source, source / "draft", *(checkpoint / "draft" for checkpoint in chosen)):
        if (folder / WEIGHTS).is_file() and (folder / "config.json").is_file():
            return folder
    raise DflashError(f"{source}: no drafter here (neither a drafter folder, a checkpoint nor a training run)")


def draft_identity(folder: Path) -> dict[str, str]:
    """Return a digest of the drafter's configuration and weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    with (folder / WEIGHTS).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {
        "architecture": read_json(folder / "config.json")["architectures"][0],
        "sha256": digest.hexdigest(),
    }
