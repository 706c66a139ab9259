"""Which attention a run trains with: flex attention where it is seen to work, else sdpa by prefix."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from dflash.architecture import Architecture
from dflash.attention import PackAttention, attention_by_prefix
from dflash.config import TrainingConfig
from dflash.data import Sample
from dflash.errors import DflashError
from dflash.flex import attention_by_tiles
from dflash.mask import block_mask
from dflash.model import Attend, KeysValues, masked_attention
from dflash.pack import Pack, build_pack
from dflash.world import World

# Documents and blocks of the check: tiles that are seen wholly, in part and not at all.
LENGTHS = (300, 520, 30, 200)
BLOCKS_OF_A_DOCUMENT = 12
# Largest difference from attention in float32, as a share of the norm: rounding of that precision, with room.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


def choose_attention(
    config: TrainingConfig, shape: Architecture, device: torch.device, world: World
) -> tuple[PackAttention, str | None]:
    """Return the attention that `config` asks for; with `auto` also why it is not flex attention on a CUDA device.

    The lead tries flex attention, and all drafters do as it finds. Raises DflashError where flex attention is asked
    for and does not work.
    """
    if not config.tries_flex:
        return attention_by_prefix, None
    wrong = world.share_among_drafters(
        what_is_wrong(attention_by_tiles, shape, getattr(torch, config.dtype), device) if world.leads else None
    )
    if wrong is None:
        return attention_by_tiles, None
    if config.attention == "flex":
        raise DflashError(f"attention: flex does not work here ({wrong}): use auto or sdpa")
    return attention_by_prefix, f"attention by sdpa, as flex attention does not work here ({wrong})"


def what_is_wrong(
    attention: PackAttention, shape: Architecture, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Compare `attention`, forward and gradient, with the plain reference at the widths of `shape`; None: no fault."""
    pack = _pack_of_the_check(device)
    # Of its own: a run's random numbers are part of its checkpoints.
    generator = torch.Generator().manual_seed(0)
    rows, tokens = len(pack.anchors) * shape.block_size, len(pack.input_ids)
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    sizes = {"queries": (heads, rows), "context keys": (kv_heads, tokens), "context values": (kv_heads, tokens)}
    sizes |= {"block keys": (kv_heads, rows), "block values": (kv_heads, rows)}
    *leaves, upstream = (
        torch.randn(1, *size, shape.head_dim, generator=generator).to(device, dtype)
        for size in (*sizes.values(), (heads, rows))
    )
    reference = masked_attention(partial(block_mask, pack.documents, pack.anchors, shape.block_size))
    names = ["the output", *(f"the gradient of {name}" for name in sizes)]
    for window in dict.fromkeys(shape.windows):
        try:
            found = _results(attention(pack, shape.block_size), leaves, upstream, window)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises: there is another way
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        expected = _results(reference, [leaf.float() for leaf in leaves], upstream.float(), window)
        for name, one, other in zip(names, found, expected, strict=True):
            difference = float((one.float() - other).norm() / other.norm())
            # Written so that NaN does not pass.
            if not difference <= TOLERANCE[dtype]:
                return f"{name} differs from the reference's by {difference:.2g} of its norm"
    return None


def _results(
    attend: Attend, leaves: list[torch.Tensor], upstream: torch.Tensor, window: int | None
) -> list[torch.Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = attend(leaves[0], KeysValues(*leaves[1:3]), KeysValues(*leaves[3:]), window)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def _pack_of_the_check(device: torch.device) -> Pack:
    rng = np.random.default_rng(0)
    ids = [np.zeros(length, dtype=np.int64) for length in LENGTHS]
    samples = [Sample(each, np.ones(len(each), dtype=np.int8)) for each in ids]
    anchors = [np.sort(rng.choice(length, BLOCKS_OF_A_DOCUMENT, replace=False)) for length in LENGTHS]
    return build_pack(samples, anchors, device)
