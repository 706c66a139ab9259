"""Checkpoints: everything a run needs to go on as if it had never stopped.

    OUTPUT/checkpoints/step-00000120/
        draft/config.json, draft/model.safetensors    the drafter, in the layout of an export, in float32
        drafter-0.safetensors                         AdamW's state and the random generators' of each drafter
        state.json                                    step, data cursor, and what the run was made of

Shuffling and anchors are drawn from (seed, epoch, pack), which the cursor names; the learning rate follows from the
step. No file is a pickle, so other versions of torch read it. A folder exists under its name only when it is whole.
"""

from __future__ import annotations

import platform
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from dflash.config import TrainingConfig
from dflash.errors import DflashError
from dflash.export import load_draft, write_draft
from dflash.files import publish_folder, read_json, write_json
from dflash.model import DraftModel
from dflash.optimizer import ShardedAdamW
from dflash.packing import Cursor, PackLimits, Span, with_limits
from dflash.world import ALONE, World

LAYOUT = 2
# Folders may move: their content is compared instead.
PATHS = frozenset({"target", "dataset", "output"})
# What may change between the parts of one run: how it is carried out, and how long it goes on.
CHANGEABLE = frozenset(
    {
        "steps",
        "topology",
        "token_budget",
        "max_batch_size",
        "acceptance",
        "checkpoint_every",
        "keep",
        "log_every",
        "stall_seconds",
        "threads",
        "device",
        "attention",
        "max_draft_rows",
        "loss_chunk_blocks",
        "feature_cache_bytes",
        "memory",
    }
)
# What may change too, but makes another order of the data: the run goes on with a new epoch.
OTHER_DATA = frozenset({"dataset", "config.mixture"})


@dataclass(frozen=True)
class Progress:
    """Where a run is: optimizer steps done, its place in the data, and sums since its first step."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    seconds: float = 0.0
    tokens: int = 0
    draft_rows: int = 0
    samples: int = 0
    step_downs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Resumed:
    """Where a checkpoint was, and what is different since, a line each."""

    progress: Progress
    changes: list[str]


def describe_run(config: TrainingConfig, dataset: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """Return what a run is made of: its configuration, dataset and target (by content), and the versions in use."""
    settings = config.model_dump(mode="json", exclude=set(PATHS)) | {"packs_per_step": config.step_packs}
    versions = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return {"config": settings, "dataset": dataset, "target": target, "versions": versions}


def save_checkpoint(
    output: Path,
    progress: Progress,
    model: DraftModel,
    optimizer: ShardedAdamW,
    run: dict[str, Any],
    keep: int,
    best: int | None = None,
    world: World = ALONE,
) -> Path:
    """Publish a checkpoint and remove older ones beyond `keep`; those of step 0 and of step `best` stay.

    Every drafter takes part. Raises DflashError when it cannot be written; those before it stay whole.
    """
    path = output / "checkpoints" / f"step-{progress.step:08d}"
    try:
        if not world.share_among_drafters(path.exists()):
            staging: AbstractContextManager[Path | None] = publish_folder(path) if world.leads else nullcontext()
            with staging as own:
                folder = world.share_among_drafters(own)
                assert folder is not None
                optimizer.save(folder)
                if world.leads:
                    write_draft(model, folder / "draft", torch.float32)
                    state = {"layout": LAYOUT, "progress": asdict(progress), "run": run}
                    write_json(folder / "state.json", state)
                world.await_drafters()
        if world.leads:
            for old in list_checkpoints(output)[:-keep]:
                if old.name not in {f"step-{0:08d}", f"step-{best or 0:08d}"}:
                    shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        raise DflashError(
            f"{path}: cannot be written ({' '.join(str(error).split())}); the checkpoints before it are whole: make "
            "room and give the same command again"
        ) from error
    return path


def list_checkpoints(output: Path) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first."""
    return sorted((output / "checkpoints").glob("step-*"))


def resume(checkpoint: Path, model: DraftModel, optimizer: ShardedAdamW, run: dict[str, Any]) -> Resumed:
    """Load `checkpoint` into model and optimizer and return where it was.

    Raises DflashError, naming every difference, when something has changed that must not.
    """
    state = read_json(checkpoint / "state.json")
    if state.get("layout") != LAYOUT:
        raise DflashError(f"{checkpoint}: written by another version of dflash: begin anew with --from-scratch")
    differences = _differences("", state["run"], run)
    refused = [text for key, text in differences if not _may_change(key)]
    if refused:
        raise DflashError(
            f"{checkpoint}: this run was started differently ({'; '.join(refused)}): restore the old settings, choose "
            "another output folder, or begin anew with --from-scratch"
        )
    model.load_state_dict(load_draft(checkpoint / "draft").state_dict())
    progress = _read_progress(state["progress"])
    optimizer.load(checkpoint, progress.step)
    changes = [text for _, text in differences]
    old, new = (PackLimits(c["token_budget"], c["max_batch_size"]) for c in (state["run"]["config"], run["config"]))
    if any(_is_within(key, OTHER_DATA) for key, _ in differences):
        changes.append(f"goes on with epoch {progress.cursor.epoch + 1} of the data as it is now")
        cursor = Cursor(progress.cursor.epoch + 1)
    else:
        cursor = with_limits(progress.cursor, old, new)
    return Resumed(Progress(**{**vars(progress), "cursor": cursor}), changes)


def _read_progress(value: dict[str, Any]) -> Progress:
    cursor = value["cursor"]
    earlier = tuple(Span(PackLimits(*limits), packs) for limits, packs in cursor["earlier"])
    return Progress(**{**value, "cursor": Cursor(cursor["epoch"], cursor["pack"], earlier)})


def _may_change(key: str) -> bool:
    return key.startswith("versions.") or _is_within(key, OTHER_DATA | {f"config.{name}" for name in CHANGEABLE})


def _is_within(key: str, names: frozenset[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _differences(name: str, old: Any, new: Any) -> list[tuple[str, str]]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [found for key in keys for found in _differences(f"{name}.{key}", old.get(key), new.get(key))]
    key = name.lstrip(".")
    return [] if old == new else [(key, f"{key} was {old} and is {new}")]
