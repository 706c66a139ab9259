"""Training metrics: sums over steps and the line of `metrics.jsonl` they become; files of one line a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.objective import BlockLoss, Labels
from dflash.pack import Pack
from dflash.world import World

# In a run's folder: a line for each step whose acceptance was measured.
ACCEPTANCE_CURVE = "acceptance.jsonl"


class StepSums:
    """Sums over the steps between two lines of metrics."""

    def __init__(self, block_size: int) -> None:
        self.steps = 0
        self.loss = 0.0
        self.terms: dict[str, float] = {}
        self.tokens = 0
        self.draft_rows = 0
        self.samples = 0
        self.supervised = 0
        self.covered = 0
        self.seconds = 0.0
        self.correct = torch.zeros(block_size - 1, dtype=torch.long)
        self.labels = torch.zeros(block_size - 1, dtype=torch.long)
        self.accepted = 0
        self.complete_blocks = 0

    def add(self, result: BlockLoss, labels: Labels, pack: Pack) -> None:
        """Take in what this drafter did with one pack."""
        correct = unflatten_correct(result.correct, labels).cpu()
        labelled = (labels.weights[:, 1:] > 0).cpu()
        # A slot without a label is neither right nor wrong: only complete blocks tell an acceptance length.
        complete = labelled.all(dim=1)
        self.loss += float(result.loss.detach())
        for name, value in result.terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + float(value)
        self.tokens += len(pack.input_ids)
        self.draft_rows += labels.weights.numel()
        self.samples += int(pack.on_host.documents[-1]) + 1
        self.supervised += int((pack.on_host.loss_mask != 0).sum())
        self.covered += int((labels.rows[labels.weights > 0].bincount() > 0).sum())
        self.correct += correct.sum(0)
        self.labels += labelled.sum(0)
        self.accepted += int(correct[complete].long().cumprod(dim=1).sum()) + int(complete.sum())
        self.complete_blocks += int(complete.sum())

    def end_step(self, seconds: float) -> None:
        """Note that a step is over, which took `seconds`."""
        self.steps += 1
        self.seconds += seconds

    def over_drafters(self, world: World) -> StepSums:
        """Return the sums of all drafters; steps and seconds are theirs in common."""
        names = ("loss", "tokens", "draft_rows", "samples", "supervised", "covered", "accepted", "complete_blocks")
        terms = sorted(self.terms)
        own = [
            *(float(getattr(self, name)) for name in names),
            *(self.terms[name] for name in terms),
            *self.correct.tolist(),
            *self.labels.tolist(),
        ]
        found = iter(world.add_among_drafters(own))
        total = StepSums(len(self.correct) + 1)
        total.steps, total.seconds = self.steps, self.seconds
        for name in names:
            value = next(found)
            setattr(total, name, value if name == "loss" else round(value))
        total.terms = {name: next(found) for name in terms}
        total.correct = torch.tensor([round(next(found)) for _ in self.correct])
        total.labels = torch.tensor([round(next(found)) for _ in self.labels])
        return total

    def line(self) -> dict[str, Any]:
        """Return the means: loss, accuracy (all and by position) and tokens/s.

        `terms` are the parts of the loss before they are weighted. `coverage` is the share of the packs' supervised
        tokens that were a label of some block. `acceptance_estimate` is the mean over complete blocks of 1 + the
        number of leading hits, with the data's tokens as the truth; decoding may differ.
        """
        by_position = self.correct / self.labels.clamp(min=1)
        return {
            "loss": self.loss / self.steps,
            "terms": {name: value / self.steps for name, value in self.terms.items()},
            "accuracy": float(self.correct.sum() / self.labels.sum().clamp(min=1)),
            "accuracy_by_position": [round(float(value), 4) for value in by_position],
            "acceptance_estimate": self.accepted / self.complete_blocks if self.complete_blocks else None,
            "coverage": self.covered / max(self.supervised, 1),
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
        }


def unflatten_correct(correct: Tensor, labels: Labels) -> Tensor:
    """Return hits as bool [blocks, block_size - 1]; slots without a label are False."""
    hits = torch.zeros_like(labels.weights, dtype=torch.bool)
    hits[labels.weights > 0] = correct.to(hits.device)
    return hits[:, 1:]


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line and flush it to the operating system, so that readers see it at once."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")


def best_step(path: Path, at: int | None = None) -> int | None:
    """Return the first step of the highest acceptance length in the curve at `path`; None where nothing is measured.

    Args:
        at: look at the line of this step alone.
    """
    best: tuple[float, int] | None = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        value = json.loads(line)
        length = value["acceptance_length"]
        if length is not None and at in (None, value["step"]) and (best is None or length > best[0]):
            best = (length, value["step"])
    return None if best is None else best[1]


def drop_lines_after(path: Path, step: int) -> None:
    """Remove lines after `step`, which a resumed run writes again, and a half-written last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
