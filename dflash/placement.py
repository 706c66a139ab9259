"""A target on several cards: its layers in order over them, all else on the first, where input and output are.

What a layer is given follows it to its card. Beside layers and hooks nothing knows of the cards; a cache is filled by
the layers, each on its own.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dflash.errors import DflashError


def check_device(name: str) -> None:
    """Raise DflashError when `name` is no CPU and no card of this machine."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DflashError(f"device {name}: must be cpu, cuda or cuda:N") from error
    there = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= there:
        raise DflashError(f"device {name}: {there} cards are here, counted from 0: use another one, or cpu")


def cards_of_layers(of_layers: list[int], of_others: int, cards: int) -> list[int]:
    """Return the card of each layer, such that the fullest card has as few parameters as can be.

    Args:
        of_layers: the parameters of each layer, in order; a card has neighbours.
        of_others: the parameters beside the layers; the first card has them.
    """
    least, most = max(of_others, *of_layers), of_others + sum(of_layers)
    while least < most:
        middle = (least + most) // 2
        if _fill(of_layers, of_others, middle)[-1] < cards:
            most = middle
        else:
            least = middle + 1
    return _fill(of_layers, of_others, least)


def place(model: nn.Module, layers: nn.ModuleList, devices: list[torch.device]) -> None:
    """Put the parts of `model` on `devices`, and see to it that a forward pass goes from one to the next."""
    cards = cards_of_layers(*parameters_of(model, layers), len(devices))
    for layer, card in zip(layers, cards, strict=True):
        layer.to(devices[card])
    inside = {id(tensor) for tensor in chain(layers.parameters(), layers.buffers())}
    for tensor in chain(model.parameters(), model.buffers()):
        if id(tensor) not in inside:
            tensor.data = tensor.data.to(devices[0])
    carry_along(layers, [devices[card] for card in cards], devices[0])


def carry_along(layers: nn.ModuleList, devices: list[torch.device], home: torch.device) -> None:
    """Have what each layer is given moved to its device, and what the last one returns to `home`."""

    def hook_of(device: torch.device) -> Any:
        return lambda _layer, args, kwargs: (_moved(args, device), _moved(kwargs, device))

    for layer, device in zip(layers, devices, strict=True):
        layer.register_forward_pre_hook(hook_of(device), with_kwargs=True)
    layers[-1].register_forward_hook(lambda _layer, _inputs, output: _moved(output, home))


def parameters_of(model: nn.Module, layers: nn.ModuleList) -> tuple[list[int], int]:
    """Count the parameters of each of `layers`, and those of `model` beside them."""
    of_layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    return of_layers, sum(parameter.numel() for parameter in model.parameters()) - sum(of_layers)


def _fill(of_layers: list[int], of_others: int, capacity: int) -> list[int]:
    """Fill card after card with layers up to `capacity`, which holds the largest."""
    cards, card, held = [], 0, of_others
    for size in of_layers:
        if held + size > capacity:
            card, held = card + 1, 0
        held += size
        cards.append(card)
    return cards


def _moved(value: Any, device: torch.device) -> Any:
    """Return `value` with the tensors in it on `device`; a cache, which is neither, stays as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(_moved(part, device) for part in value)
    if isinstance(value, dict):
        return {key: _moved(part, device) for key, part in value.items()}
    return value
