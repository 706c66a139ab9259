"""How much memory each process of a run needs, before any weight is loaded.

Every part follows from shapes. Activations are those of this project's own step, counted tensor by tensor: what a layer
keeps for its backward pass for each block row, and what the context keeps for each token. Workspace is what exists for
a moment only: the logits of a chunk, or the largest gradients of a layer, whichever is more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from dflash.architecture import Architecture, tensor_shapes
from dflash.config import DtypeName, Role, TrainingConfig
from dflash.errors import DflashError
from dflash.flex import padded_length
from dflash.initialize import architecture_for
from dflash.limits import draft_rows, limits_after, rows_at_once
from dflash.placement import cards_of_layers, parameters_of
from dflash.target import decoder_layers
from dflash.target_files import weightless_target

ROLES: tuple[Role, ...] = get_args(Role)
FP32 = 4
SIZES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2}
# Tensors of the vocabulary's width that a chunk with a teacher has at once, in fp32.
TEACHER_TENSORS = 8


@dataclass(frozen=True)
class TargetShape:
    """What a plan needs of a target: its configuration (the decoder's) and whether the head is tied; parameters.

    `of_layers` are those of each layer, `of_others` those beside the layers.
    """

    text: Any
    tied: bool
    of_layers: list[int]
    of_others: int

    @property
    def parameters(self) -> int:
        """Parameters in all."""
        return sum(self.of_layers) + self.of_others


@dataclass(frozen=True)
class Plan:
    """Bytes of each part of one process on one of its cards, and two ways to fit, each with all else as it is.

    `largest_token_budget` is None where not even max_length fits or it does not matter; `largest_draft_rows` (for
    max_draft_rows, which leaves the gradient as it is) where not even one block does or the process has none.
    """

    role: Role
    card: int
    cards: int
    parts: dict[str, int]
    limit: int
    largest_token_budget: int | None
    largest_draft_rows: int | None

    @property
    def name(self) -> str:
        """The role; of a process with several cards also which one, from 1."""
        return self.role if self.cards == 1 else f"{self.role} {self.card + 1}/{self.cards}"

    @property
    def total(self) -> int:
        """All parts together, in bytes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the parts are within the limit."""
        return self.total <= self.limit


def read_target_shape(path: Path) -> TargetShape:
    """Read `config.json` in `path` and count the parameters without making them.

    Raises DflashError when it is missing, or of no model that transformers knows.
    """
    model = weightless_target(path)
    text = model.config
    return TargetShape(text, bool(text.tie_word_embeddings), *parameters_of(model, decoder_layers(model, path)))


def cards_of_role(role: Role, config: TrainingConfig) -> int:
    """Return how many cards a process has; on a CPU all are one."""
    several = role == "target" and config.device.startswith("cuda")
    return config.topology.cards_per_target if several else 1


def make_plan(
    role: Role, config: TrainingConfig, target: TargetShape, limit: int, baseline: int, card: int = 0
) -> Plan:
    """Plan one card of one process.

    Args:
        role: what the process does; `colocated` is both in one.
        limit: bytes of the card.
        baseline: bytes that a process holds before it loads anything, as measured: context, libraries, allocator.
        card: which of the process's cards.
    """

    def fits(**changes: int) -> bool:
        other = config.model_copy(update=changes)
        return sum(memory_parts(role, other, target, baseline, card).values()) <= limit

    # Only the first of a target's cards holds anything of a whole pack.
    tokens = _largest(config.max_length, lambda count: fits(token_budget=count)) if card == 0 else None
    block_size, rows = config.draft.block_size, None
    if role != "target":
        most = draft_rows(config) // block_size
        blocks = _largest(1, lambda count: count <= most and fits(max_draft_rows=count * block_size))
        rows = None if blocks is None else blocks * block_size
    parts = memory_parts(role, config, target, baseline, card)
    return Plan(role, card, cards_of_role(role, config), parts, limit, tokens, rows)


def _largest(least: int, holds: Callable[[int], bool]) -> int | None:
    """Return the largest count from `least` on for which `holds` is still true."""
    if not holds(least):
        return None
    low, high = least, 2 * least
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def memory_parts(
    role: Role, config: TrainingConfig, target: TargetShape, baseline: int, card: int = 0
) -> dict[str, int]:
    """Return the bytes of each part of a process on one of its cards, by name."""
    shape = architecture_for(config.draft, target.text, mask_token_id=0)
    parts = {"baseline": baseline}
    ends = (1 if target.tied else 2) * shape.vocab_size * shape.hidden_size
    here = ends if role == "drafter" else _parameters_on(card, cards_of_role(role, config), target)
    parts["target weights"] = SIZES[config.target_dtype] * here
    if role != "drafter":
        parts["target activations"] = _target_activations(config, shape)
    if card > 0:
        return parts
    parts["features of the pack"] = config.token_budget * feature_bytes(shape, config)
    if role == "target" and config.device == "cpu":
        # With cards it is the host's memory, which no card's plan counts.
        parts["look-ahead"] = config.topology.look_ahead_bytes
    parts["feature cache"] = config.feature_cache_bytes if role != "target" else 0
    if role != "target":
        parts |= drafter_parts(config, shape)
    elif config.acceptance is not None:
        # The first target's alone, but all are planned alike.
        parts["drafter to measure"] = FP32 * drafter_parameters(shape)
    return parts


def drafter_parameters(shape: Architecture) -> int:
    """Count the drafter's parameters."""
    return sum(math.prod(size) for size in tensor_shapes(shape).values())


def drafter_parts(config: TrainingConfig, shape: Architecture) -> dict[str, int]:
    """Return what training holds beside the features: the drafter, its optimizer, and one group of block rows."""
    parameters = drafter_parameters(shape)
    half = config.dtype == "bfloat16"
    rows = rows_at_once(config)
    several = draft_rows(config) > rows
    kept = rows * _row_bytes(shape, half)
    # In one group, a layer's gradients come as what it kept for them goes.
    gradients = FP32 * parameters if several else max(FP32 * parameters - kept, 0)
    if config.step_packs > config.topology.drafters:
        # Those of the step's packs before: a pack's own are apart, so that it can be repeated.
        gradients += FP32 * parameters
    return {
        "drafter weights": FP32 * parameters,
        "gradients": gradients,
        "optimizer": 2 * FP32 * parameters // (config.topology.drafters if config.topology.shard_optimizer else 1),
        "bfloat16 copies of weights": 2 * parameters if half else 0,
        "context": config.token_budget * _context_bytes(shape, half, several),
        "draft rows": kept,
        "flex attention": _flex_bytes(config, shape) if config.tries_flex else 0,
        "workspace": max(_logits_bytes(config, shape), rows * _backward_bytes(shape, half)),
    }


def feature_bytes(shape: Architecture, config: TrainingConfig) -> int:
    """Bytes of one token's features, and of its last hidden state where a teacher is needed."""
    states = len(shape.target_layer_ids) + config.objective.needs_teacher
    return FP32 * states * shape.hidden_size


def _row_bytes(shape: Architecture, half: bool) -> int:
    """What one block row keeps from its forward to its backward pass, with its input, output and output gradient."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads = shape.head_dim * (shape.num_attention_heads + shape.num_key_value_heads)
    # By layer: both norms' products and outputs and two sums; queries, keys, values and what is attended; the MLP.
    layer = 20 * hidden + 10 * heads + 8 * inner if half else 24 * hidden + 16 * heads + 16 * inner
    return shape.num_layers * layer + 20 * hidden + 2 * FP32 * shape.head_dim


def _context_bytes(shape: Architecture, half: bool, several: bool) -> int:
    """What one token's context keeps until the last group of blocks is done.

    With `several` groups also the gradients they leave in it. Not the features themselves, but their copy in half
    precision.
    """
    hidden, keys = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
    by_layer = (14 + 6 * several if half else 16 + 8 * several) * keys
    fused = 2 * len(shape.target_layer_ids) * hidden if half else 0
    return fused + 12 * hidden + shape.num_layers * by_layer + 2 * FP32 * shape.head_dim


def _flex_bytes(config: TrainingConfig, shape: Architecture) -> int:
    """What flex attention keeps of one group beside `_row_bytes` and `_context_bytes`, in all layers.

    Keys and values joined, queries and outputs, all padded; and the logarithm of each row's sum, in fp32.
    """
    tokens, rows = padded_length(config.token_budget), padded_length(rows_at_once(config))
    size = SIZES[config.dtype]
    keys, heads = shape.num_key_value_heads * shape.head_dim, shape.num_attention_heads
    padding = (rows - rows_at_once(config)) * heads * shape.head_dim * size
    by_layer = 2 * (tokens + rows) * keys * size + rows * heads * (shape.head_dim * size + FP32) + padding
    return shape.num_layers * by_layer


def _backward_bytes(shape: Architecture, half: bool) -> int:
    """The gradients inside an MLP for one block row, less what was freed before they are made."""
    return max((2 if half else 4) * 2 * shape.intermediate_size - 8 * shape.hidden_size, 0)


def _logits_bytes(config: TrainingConfig, shape: Architecture) -> int:
    """What one chunk of logits takes."""
    limits = limits_after(config, shape.vocab_size, torch.device(config.device), {})
    # The anchor's slot has no label.
    rows = min(limits.loss_chunk_blocks, limits.max_draft_rows // shape.block_size) * (shape.block_size - 1)
    if config.objective.needs_teacher:
        width = FP32 * TEACHER_TENSORS
    else:
        # In a half-precision head the logits and their slope pass through a copy in that precision.
        width = FP32 if config.target_dtype == "float32" else FP32 + SIZES[config.target_dtype]
    return rows * shape.vocab_size * width


def _parameters_on(card: int, cards: int, target: TargetShape) -> int:
    """The target's parameters on one of its cards."""
    places = cards_of_layers(target.of_layers, target.of_others, cards)
    of_layers = sum(count for count, place in zip(target.of_layers, places, strict=True) if place == card)
    return of_layers + (target.of_others if card == 0 else 0)


def _target_activations(config: TrainingConfig, shape: Architecture) -> int:
    """The target's own forward pass over its longest document; nothing is kept for a backward pass."""
    inner, hidden = shape.intermediate_size, shape.hidden_size
    return config.max_length * SIZES[config.target_dtype] * (3 * inner + 6 * hidden)


def check_memory(config: TrainingConfig, role: Role, devices: list[str]) -> int:
    """Return what this process is planned to hold on all its cards, beside its baseline; 0 where nothing is checked.

    Without a limit in the configuration, a CUDA device's free memory is it, and on a CPU nothing is checked.

    Args:
        devices: those of this process.

    Raises DflashError, saying what to change, when the plan is over the limit.
    """
    limit, baseline = config.memory.limit_bytes, config.memory.baseline_bytes
    if limit is None and torch.device(devices[0]).type != "cuda":
        return 0
    target, planned = read_target_shape(config.target), 0
    for card, device in zip(range(cards_of_role(role, config)), devices, strict=False):
        if limit is None:
            # What the context and others hold is no longer free.
            plan = make_plan(role, config, target, torch.cuda.mem_get_info(device)[0], 0, card)
        else:
            plan = make_plan(role, config, target, limit, baseline, card)
        if not plan.fits:
            raise DflashError(f"{plan.name}: {refusal(plan, config)}")
        planned += plan.total - plan.parts["baseline"]
    return planned


def refusal(plan: Plan, config: TrainingConfig) -> str:
    """Say in one line by how much a plan is over the limit, and what to change."""
    largest = max(plan.parts, key=lambda name: plan.parts[name])
    text = (
        f"{plan.total / 1e9:.2f} GB planned, {plan.limit / 1e9:.2f} GB there; the largest part is {largest} "
        f"({plan.parts[largest] / 1e9:.2f} GB); "
    )
    ways = []
    if plan.largest_draft_rows is not None:
        ways.append(
            f"max_draft_rows {plan.largest_draft_rows} fits, with the same gradient (now {rows_at_once(config)})"
        )
    if plan.largest_token_budget is not None:
        ways.append(f"token_budget {plan.largest_token_budget} fits (now {config.token_budget})")
    ahead = plan.parts.get("look-ahead", 0)
    if ahead and (fitting := ahead - (plan.total - plan.limit)) > 0:
        ways.append(f"topology.look_ahead_bytes {fitting} fits (now {ahead})")
    if plan.role == "target" and not ahead:
        ways.append(f"more cards for a target (topology.cards_per_target, now {config.topology.cards_per_target})")
    return text + (" or ".join(ways) or "neither max_draft_rows nor token_budget alone makes it fit")


def as_table(plans: list[Plan]) -> str:
    """Return the parts of some plans as a text table, in GB of 10^9 bytes."""
    names = list(dict.fromkeys(name for plan in plans for name in plan.parts))
    width = max(map(len, names)) + 2
    lines = ["GB".ljust(width) + "".join(f"{plan.name:>12}" for plan in plans)]
    for name in names:
        lines.append(name.ljust(width) + "".join(_cell(plan.parts.get(name)) for plan in plans))
    lines.append("all".ljust(width) + "".join(_cell(plan.total) for plan in plans))
    lines.append("limit".ljust(width) + "".join(_cell(plan.limit) for plan in plans))
    budgets = ("" if plan.card > 0 else plan.largest_token_budget or "none" for plan in plans)
    lines.append("largest token_budget".ljust(width) + "".join(f"{budget:>12}" for budget in budgets))
    return "\n".join(lines)


def _cell(size: int | None) -> str:
    return f"{'' if size is None else f'{size / 1e9:.2f}':>12}"
