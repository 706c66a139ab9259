"""Flex attention with its gradient on a CPU, where it is for tests alone: not compiled, all scores at once."""

from __future__ import annotations

import warnings
from unittest import mock

from torch import Tensor
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import BlockMask

from dflash.flex import attention_by_tiles, plain_flex_attention
from dflash.model import Attend
from dflash.pack import Pack


def attention_by_plain_tiles(pack: Pack, block_size: int) -> Attend:
    """`attention_by_tiles`, computed plainly; by the mask's rule, whatever its tiles."""
    return attention_by_tiles(pack, block_size, _with_gradient)


def _with_gradient(queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
    with warnings.catch_warnings(), mock.patch.object(module, "_validate_device"):
        # On a CPU it refuses tensors that need a gradient, as compiled kernels have none there. Plainly it has one.
        warnings.simplefilter("ignore")
        return plain_flex_attention(queries, keys, values, mask)
