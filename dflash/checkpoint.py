"""Checkpoints: everything a run needs to go on as if it had never stopped.

    OUTPUT/checkpoints/step-00000120/
        draft/config.json, draft/model.safetensors    the drafter, in the layout of an export, in float32
        optimizer.pt                                  AdamW's state
        state.json                                    step, data cursor, and what the run was made of

No random state is stored: shuffling and anchors are drawn from (seed, epoch, pack), which the cursor names.
A folder exists under its name only when it is whole.
"""

from __future__ import annotations

import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from dflash.config import TrainingConfig
from dflash.errors import DflashError
from dflash.export import load_draft, write_draft
from dflash.files import publish_folder, read_json, write_json
from dflash.model import DraftModel

# What may change between the parts of one run. Folders may move: their content is compared instead.
CHANGEABLE = frozenset(
    {
        "target",
        "dataset",
        "output",
        "acceptance",
        "checkpoint_every",
        "keep",
        "log_every",
        "threads",
        "feature_cache_bytes",
        "max_draft_rows",
        "loss_chunk_blocks",
        "memory",
    }
)


@dataclass(frozen=True)
class Progress:
    """Where a run is: optimizer steps done, the next pack to train on, and the seconds spent."""

    step: int = 0
    epoch: int = 0
    pack: int = 0
    seconds: float = 0.0


def describe_run(config: TrainingConfig, dataset: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """Return what must stay the same for a run to go on: configuration, dataset and target by content."""
    settings = config.model_dump(mode="json", exclude=set(CHANGEABLE))
    return {"config": settings, "dataset": dataset, "target": target}


def save_checkpoint(
    output: Path,
    progress: Progress,
    model: DraftModel,
    optimizer: torch.optim.Optimizer,
    run: dict[str, Any],
    keep: int,
    best: int | None = None,
) -> Path:
    """Publish a checkpoint and remove older ones beyond `keep`; those of step 0 and of step `best` stay."""
    path = output / "checkpoints" / f"step-{progress.step:08d}"
    if not path.exists():
        with publish_folder(path) as folder:
            write_draft(model, folder / "draft", torch.float32)
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
            versions = {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            }
            write_json(folder / "state.json", {"progress": asdict(progress), "run": run, "versions": versions})
    for old in list_checkpoints(output)[:-keep]:
        if old.name not in {f"step-{0:08d}", f"step-{best or 0:08d}"}:
            shutil.rmtree(old)
    return path


def list_checkpoints(output: Path) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first."""
    return sorted((output / "checkpoints").glob("step-*"))


def resume(checkpoint: Path, model: DraftModel, optimizer: torch.optim.Optimizer, run: dict[str, Any]) -> Progress:
    """Load `checkpoint` into model and optimizer and return where it was.

    Raises DflashError, naming every difference, when it belongs to another configuration, dataset or target.
    """
    state = read_json(checkpoint / "state.json")
    changes = _differences("", state["run"], run)
    if changes:
        raise DflashError(
            f"{checkpoint}: this run was started differently ({'; '.join(changes)}): "
            "restore the old settings or choose another output folder"
        )
    device = next(model.parameters()).device
    model.load_state_dict(load_draft(checkpoint / "draft").state_dict())
    optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location=device, weights_only=True))
    return Progress(**state["progress"])


def _differences(name: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [text for key in keys for text in _differences(f"{name}.{key}", old.get(key), new.get(key))]
    return [] if old == new else [f"{name.lstrip('.')} was {old} and is {new}"]
