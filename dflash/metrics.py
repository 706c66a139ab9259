"""Training metrics: sums over steps, and the line of `metrics.jsonl` they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.objective import BlockLoss, Labels


class StepSums:
    """Sums over the steps between two lines of metrics."""

    def __init__(self, block_size: int) -> None:
        self.steps = 0
        self.loss = 0.0
        self.tokens = 0
        self.seconds = 0.0
        self.correct = torch.zeros(block_size - 1, dtype=torch.long)
        self.labels = torch.zeros(block_size - 1, dtype=torch.long)
        self.accepted = 0
        self.complete_blocks = 0

    def add(self, result: BlockLoss, labels: Labels, tokens: int, seconds: float) -> None:
        """Take in one step over `tokens` tokens that took `seconds`."""
        correct = unflatten_correct(result.correct, labels).cpu()
        labelled = (labels.weights[:, 1:] > 0).cpu()
        # A slot without a label is neither right nor wrong: only complete blocks tell an acceptance length.
        complete = labelled.all(dim=1)
        self.steps += 1
        self.loss += float(result.loss.detach())
        self.tokens += tokens
        self.seconds += seconds
        self.correct += correct.sum(0)
        self.labels += labelled.sum(0)
        self.accepted += int(correct[complete].long().cumprod(dim=1).sum()) + int(complete.sum())
        self.complete_blocks += int(complete.sum())

    def line(self) -> dict[str, Any]:
        """Return the means: loss, accuracy (all and by position) and tokens/s.

        `acceptance_estimate` is the mean over complete blocks of 1 + the number of leading hits, with the
        data's tokens as the truth; decoding may differ.
        """
        by_position = self.correct / self.labels.clamp(min=1)
        return {
            "loss": self.loss / self.steps,
            "accuracy": float(self.correct.sum() / self.labels.sum().clamp(min=1)),
            "accuracy_by_position": [round(float(value), 4) for value in by_position],
            "acceptance_estimate": self.accepted / self.complete_blocks if self.complete_blocks else None,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
        }


def unflatten_correct(correct: Tensor, labels: Labels) -> Tensor:
    """Return hits as bool [blocks, block_size - 1]; slots without a label are False."""
    hits = torch.zeros_like(labels.weights, dtype=torch.bool)
    hits[labels.weights > 0] = correct
    return hits[:, 1:]


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line and flush it to the operating system, so that readers see it at once."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")


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
