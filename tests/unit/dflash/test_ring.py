"""States that cross to or from a device cross it as they are: another dtype would go by way of unpinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.features import TargetStates
from dflash.ring import Ring, SlotShape, make_ring

SHAPE = SlotShape(tokens=4, features=6, final=3, dtype=torch.bfloat16)
# A device without memory stands for a card.
CARD = torch.device("meta")


class _Crossings(TorchDispatchMode):
    """Notes the dtypes before and after each copy between devices; what would end in host memory is not carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            device = kwargs.get("device", args[0].device)
            if device != args[0].device:
                self.found.append((args[0].dtype, kwargs.get("dtype", args[0].dtype)))
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            self.found.append((args[1].dtype, args[0].dtype))
            return args[0]
        return func(*args, **kwargs)


@pytest.fixture
def ring() -> Ring:
    return make_ring(SHAPE, look_ahead_bytes=1, pinned=False)[0]


def states(make: Callable[..., Tensor], device: torch.device) -> TargetStates:
    sizes = ((3, SHAPE.features), (3, SHAPE.final))
    features, final = (make(size, device=device) for size in sizes)
    return TargetStates(features, final)


def test_no_copy_between_devices_changes_the_dtype(ring: Ring) -> None:
    with _Crossings() as crossings:
        ring.put(0, 0, states(torch.empty, CARD))
        taken = ring.take(0, 3, CARD)
    assert crossings.found == [(torch.bfloat16, torch.bfloat16)] * 4
    assert taken.final is not None
    assert taken.features.dtype == taken.final.dtype == torch.float32


def test_what_is_taken_is_what_was_put_and_stays_when_the_slot_is_filled_again(ring: Ring) -> None:
    put = states(torch.ones, torch.device("cpu"))
    ring.put(0, 0, put)
    taken = ring.take(0, 3, torch.device("cpu"))
    ring.put(1, 1, states(torch.zeros, torch.device("cpu")))
    assert torch.equal(taken.features, put.features)
    assert taken.final is not None
    assert put.final is not None
    assert torch.equal(taken.final, put.final)
