"""Stepping down after out of memory: which settings, in which order, and repeating the pack.

Only settings that leave the result as it is are touched, each by halves and in turn: `max_draft_rows`,
`loss_chunk_blocks`, and `tokens_at_once`, the tokens of a pack's documents that go through together, from
`token_budget` down. `anchors` and `block_size` carry the training signal and are no settings of this kind; nor is
`token_budget` itself, as it decides which documents make a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from dflash.config import TrainingConfig
from dflash.errors import DflashError
from dflash.objective import default_chunk_blocks

# In the order in which they are stepped down; each comes again when all have been.
SETTINGS = ("max_draft_rows", "loss_chunk_blocks", "tokens_at_once")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """What may be in memory at once."""

    max_draft_rows: int
    loss_chunk_blocks: int
    tokens_at_once: int


def draft_rows(config: TrainingConfig) -> int:
    """Return the most block rows of one pack."""
    anchors = config.anchors * (config.max_batch_size if config.anchors_per == "sequence" else 1)
    return anchors * config.draft.block_size


def rows_at_once(config: TrainingConfig) -> int:
    """Return the most block rows in memory at once, as configured."""
    return min(draft_rows(config), config.max_draft_rows or draft_rows(config))


def limits_after(
    config: TrainingConfig, vocabulary: int, device: torch.device, step_downs: Mapping[str, int]
) -> Limits:
    """Return the configured limits, each halved as often as `step_downs` counts for it."""
    block_size = config.draft.block_size
    chunk = config.loss_chunk_blocks or default_chunk_blocks(block_size, vocabulary, device)
    rows, chunk, tokens = (
        most >> step_downs.get(name, 0)
        for name, most in zip(SETTINGS, (rows_at_once(config), chunk, config.token_budget), strict=True)
    )
    return Limits(max(rows, block_size), max(chunk, 1), max(tokens, 1))


def next_step_down(
    limits_at: Callable[[Mapping[str, int]], Limits], step_downs: Mapping[str, int], longest: int
) -> dict[str, int] | None:
    """Return `step_downs` with one more: of the first of the settings stepped down least that can go lower; or None.

    Args:
        limits_at: the limits after some step-downs.
        longest: tokens of the longest document in the pack, which is not cut.
    """
    now = limits_at(step_downs)
    for name in sorted(SETTINGS, key=lambda setting: step_downs.get(setting, 0)):
        further = {**step_downs, name: step_downs.get(name, 0) + 1}
        if limits_at(further) != now and not (name == "tokens_at_once" and now.tokens_at_once <= longest):
            return further
    return None


def documents_at_once(lengths: list[int], tokens: int) -> list[slice]:
    """Cut documents, given by their lengths, into runs of at most `tokens` tokens, at least one document each."""
    runs, first, total = [], 0, 0
    for index, length in enumerate(lengths):
        if index > first and total + length > tokens:
            runs.append(slice(first, index))
            first, total = index, 0
        total += length
    return [*runs, slice(first, len(lengths))]


def repeat_until_it_fits(
    attempt: Callable[[], Result], parameters: Iterable[nn.Parameter], step_down: Callable[[str], None]
) -> Result:
    """Call `attempt`, which adds to the gradients of `parameters`, until it does not run out of memory.

    What a failed attempt left in the gradients is taken back; gradients that were there before stay.

    Args:
        step_down: called after each failure with the error's first line; it makes the next attempt smaller, or raises.
    """
    parameters = list(parameters)
    before = [parameter.grad for parameter in parameters]
    while True:
        for parameter in parameters:
            parameter.grad = None
        try:
            result = attempt()
            break
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).strip().split("\n")[0] or type(error).__name__
        # Outside the handler: the error's frames, which hold the attempt's tensors, are gone.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        step_down(reason)
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
    return result


def is_out_of_memory(error: BaseException) -> bool:
    """Tell a failed allocation, of a device or of the host, from other errors."""
    # The host's allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def nothing_left(step: int, limits: Limits, reason: str) -> DflashError:
    """The error for a pack that does not fit with every setting at its lowest."""
    return DflashError(
        f"step {step}: out of memory ({reason}) with every harmless setting at its lowest ({limits}); the last "
        "checkpoint is whole; use a card with more memory, or a lower token_budget or max_length"
    )
