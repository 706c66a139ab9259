"""One run on one card, under six minutes: parity, peak memory against the plan, and the step's time at real sizes.

    PYTHONPATH=. python -m tests.gpu.measure [--device cuda] [--output readings.json]

Prints readings as JSON and exits with 1 if a check fails. Steps are taken with flex attention and with sdpa. With
--small the same runs in seconds on a CPU, where flex attention is not compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config

from dflash.attention import PackAttention, attention_by_prefix
from dflash.config import TrainingConfig
from dflash.data import Sample
from dflash.features import TargetStates
from dflash.flex import attention_by_tiles
from dflash.initialize import architecture_for
from dflash.model import DraftModel
from dflash.pack import Pack, build_pack
from dflash.plan import drafter_parts, feature_bytes
from dflash.step import accumulate_gradient, reference_loss
from dflash.target import TargetEnds
from tests.flex_on_cpu import attention_by_plain_tiles

MASK = 16


@dataclass(frozen=True)
class Size:
    """A drafter's widths, and how much goes through it."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    layers: int
    block: int
    anchors: int
    tokens: int
    documents: int
    max_draft_rows: int


REAL = Size(5120, 17_408, 32, 8, 128, 248_320, 5, 32, 1024, 49_152, 16, 8192)
# The dense mask and all logits of REAL fit on no card: the plain way is compared at this size.
PLAIN = Size(5120, 17_408, 32, 8, 128, 32_000, 2, 32, 128, 6144, 4, 4096)
SMALL = Size(64, 128, 4, 2, 16, 500, 2, 8, 32, 256, 4, 128)


@dataclass(frozen=True)
class Case:
    """A drafter and a pack of random documents and features on a device."""

    config: TrainingConfig
    model: DraftModel
    ends: TargetEnds
    pack: Pack
    states: TargetStates
    attention: PackAttention

    def step(self) -> None:
        accumulate_gradient(self.model, self.ends, self.pack, self.states, self.config, attention=self.attention)

    def plain_step(self) -> None:
        loss = reference_loss(self.model, self.ends, self.pack, self.states, self.config).loss
        loss.backward()  # type: ignore[no-untyped-call]


def make_case(size: Size, device: torch.device, dtype: str, attention: str) -> Case:
    """Make drafter and data, the same for the same size, and the attention `flex` or `sdpa`."""
    torch.manual_seed(0)
    config = TrainingConfig.model_validate(
        {"target": "t", "dataset": "d", "output": "o", "steps": 1, "device": str(device)}
        | {"anchors": size.anchors, "token_budget": size.tokens, "max_length": size.tokens // size.documents}
        | {"max_draft_rows": size.max_draft_rows, "dtype": dtype, "target_dtype": dtype}
        | {"attention": attention if device.type == "cuda" else "sdpa"}
        | {"draft": {"num_layers": size.layers, "block_size": size.block, "mask_token_id": MASK}}
    )
    text = Qwen3Config(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        vocab_size=size.vocabulary,
        num_hidden_layers=64,
    )
    model = DraftModel(architecture_for(config.draft, text, MASK)).to(device)
    weights = torch.randn(size.vocabulary, size.hidden, device=device, dtype=getattr(torch, dtype)) * 0.02
    rng = np.random.default_rng(0)
    length = size.tokens // size.documents
    samples, anchors = [], []
    for _ in range(size.documents):
        mask = (np.arange(length) >= length // 4).astype(np.int8)
        samples.append(Sample(rng.integers(0, size.vocabulary, length), mask))
        anchors.append(np.sort(rng.choice(np.flatnonzero(mask)[:-1], size.anchors // size.documents, replace=False)))
    features = torch.randn(size.tokens, model.fc.in_features, device=device)
    ends = TargetEnds(torch.nn.Embedding.from_pretrained(weights), weights, Path())
    by_tiles = attention_by_tiles if device.type == "cuda" else attention_by_plain_tiles
    chosen = by_tiles if attention == "flex" else attention_by_prefix
    return Case(config, model, ends, build_pack(samples, anchors, device), TargetStates(features, None), chosen)


def parity(size: Size, device: torch.device, attention: str) -> dict[str, float]:
    """Return the largest difference of any parameter's gradient from the plain step's, as a share of its norm."""
    case = make_case(size, device, "float32", attention)
    gradients = []
    for step in (case.step, case.plain_step):
        case.model.zero_grad()
        step()
        gradients.append({name: parameter.grad for name, parameter in case.model.named_parameters()})
    worst = 0.0
    for name, expected in gradients[1].items():
        found = gradients[0][name]
        assert expected is not None
        assert found is not None
        worst = max(worst, float((found - expected).norm() / expected.norm()))
    return {"gradient_difference": worst}


def timed(step: Callable[[], object], device: torch.device, rounds: int = 3) -> float:
    """Return the least seconds of a few steps, after one to warm up."""
    seconds = []
    for _ in range(rounds + 1):
        _wait(device)
        begun = time.perf_counter()
        step()
        _wait(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def product_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Return operations a second of a square matrix product, as measured."""
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / timed(lambda: torch.mm(left, right), device)


def floor_flop(size: Size) -> float:
    """Operations of the products that a step cannot do without; attention, a few per cent, is left out."""
    width, rows = size.head_dim, size.anchors * size.block
    queries, keys = size.heads * width, size.kv_heads * width
    by_row = 2 * size.hidden * queries + 2 * size.hidden * keys + 3 * size.hidden * size.inner
    by_token = size.layers * 2 * size.hidden * keys + size.layers * size.hidden**2
    labelled = rows * (size.block - 1) / size.block
    return 6 * (rows * size.layers * by_row + size.tokens * by_token) + 4 * labelled * size.hidden * size.vocabulary


def real_step(size: Size, device: torch.device, dtype: str, attention: str) -> dict[str, float]:
    """Time the step at `size`, and compare its peak memory with the plan where the device tells it."""
    case = make_case(size, device, dtype, attention)
    seconds = timed(case.step, device)
    rate = product_rate(device, getattr(torch, dtype), 8192 if size is REAL else 256)
    readings = {
        "seconds": seconds,
        "draft_rows_per_s": size.anchors * size.block / seconds,
        "product_flop_per_s": rate,
        "times_floor": seconds * rate / floor_flop(size),
    }
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        case.step()
        shape = case.model.architecture
        planned = sum(drafter_parts(case.config, shape).values()) + size.tokens * feature_bytes(shape, case.config)
        # The optimizer is not made here; embedding and head are one tensor.
        planned -= drafter_parts(case.config, shape)["optimizer"]
        planned += case.ends.head.nbytes
        readings["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        readings["planned_bytes"] = planned
        readings["peak_to_plan"] = readings["peak_bytes"] / planned
    return readings


def plain_step(size: Size, device: torch.device, dtype: str, attention: str) -> dict[str, float]:
    """Time the step against the plain one: a mask over the whole pack, all rows and all logits at once."""
    case = make_case(size, device, dtype, attention)
    ours, plain = timed(case.step, device), timed(case.plain_step, device)
    return {"seconds": ours, "plain_seconds": plain, "times_faster": plain / ours}


def measure(device: torch.device, small: bool) -> dict[str, Any]:
    """Return all readings, and in `failed` the checks that do not hold."""
    dtype = "float32" if small else "bfloat16"
    readings: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": str(torch.__version__),
    }
    failed = []
    for attention in ("flex", "sdpa"):
        found: dict[str, Any] = {
            "parity": parity(SMALL, device, attention),
            "step": real_step(SMALL if small else REAL, device, dtype, attention),
            "plain": plain_step(SMALL if small else PLAIN, device, dtype, attention),
        }
        if not found["parity"]["gradient_difference"] <= 1e-3:
            failed.append(f"{attention}: gradients differ from the plain step's")
        if abs(found["step"].get("peak_to_plan", 1.0) - 1) > 0.1:
            failed.append(f"{attention}: peak memory is not within 10 % of the plan")
        readings[attention] = found
    return readings | {"failed": failed}


def main() -> int:
    """Measure, print and write the readings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="seconds on a CPU")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    readings = measure(torch.device(arguments.device), arguments.small)
    text = json.dumps(readings, indent=2)
    sys.stdout.write(text + "\n")
    if arguments.output is not None:
        arguments.output.write_text(text)
    return 1 if readings["failed"] else 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
