"""Where a drafter gets the target's states of its packs: from its own target, or from the targets' rings."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from dflash.batch import PackContent
from dflash.features import FeatureSource, TargetStates
from dflash.model import DraftModel
from dflash.parts import Clock
from dflash.ring import RingAddress, open_ring
from dflash.world import LEAD, World


class Supply(Protocol):
    """Gives the states of packs in the order of their numbers."""

    def take(self, number: int, content: PackContent, /) -> TargetStates:
        """Return the states of the run's pack `number`."""

    def close(self) -> None:
        """Say that no more packs are taken."""


class OwnTarget:
    """The target in this process."""

    def __init__(self, source: FeatureSource, clock: Clock) -> None:
        self._source, self._clock = source, clock

    def take(self, _number: int, content: PackContent) -> TargetStates:
        """Run the target on the pack."""
        with self._clock.part("target_forward"):
            return self._source.states(content.rows, content.samples)

    def close(self) -> None:
        """There is nobody to tell."""


class OtherTargets:
    """The targets of other processes. Pack `number` comes from target `number` modulo their count."""

    def __init__(self, addresses: list[RingAddress], device: torch.device, clock: Clock) -> None:
        self._rings = [open_ring(address, pinned=device.type == "cuda") for address in addresses]
        self._device, self._clock = device, clock

    def take(self, number: int, content: PackContent) -> TargetStates:
        """Wait for the pack's target and fetch the states."""
        turn, index = divmod(number, len(self._rings))
        with self._clock.part("data_wait"):
            self._rings[index].await_pack(turn, number)
        with self._clock.part("transfer"):
            return self._rings[index].take(turn, content.tokens, self._device)

    def close(self) -> None:
        """Let the targets end."""
        for ring in self._rings:
            ring.close()

    def measure(self, world: World, model: DraftModel) -> dict[str, Any]:
        """As the lead, have the first target measure the drafter's acceptance."""
        with self._clock.part("data_wait"):
            self._rings[0].ask()
            for parameter in model.parameters():
                dist.send(parameter.detach().cpu(), world.first_target)
            box: list[Any] = [None]
            dist.recv_object_list(box, world.first_target)
        measured: dict[str, Any] = box[0]
        return measured


def receive_weights(model: DraftModel) -> None:
    """As the first target, take the weights of a drafter that is to be measured."""
    for parameter in model.parameters():
        weights = torch.empty(parameter.shape, dtype=parameter.dtype)
        dist.recv(weights, LEAD)
        parameter.data.copy_(weights)


def send_measured(measured: dict[str, Any]) -> None:
    """As the first target, tell the lead what was measured."""
    dist.send_object_list([measured], LEAD)
