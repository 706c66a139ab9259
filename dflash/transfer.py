"""Copies from the host's memory to a device that do not hold up the host."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host's memory on `device`, without waiting for what the device is still doing."""
    # Only from pinned memory does a copy to a card not wait for the work before it.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
