"""The processes of a run: which ranks there are, what each does, and how they agree.

Ranks 0..drafters-1 train; rank 0 leads: it writes the checkpoints and the metrics. The ranks after them run the target.
Small facts go by gloo. Gradients and weights go among the drafters by NCCL on GPUs, else by gloo. States go from target
to drafter through shared host memory (dflash.ring), so no card needs access to another's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.config import Role, TopologyConfig, role_of

Shared = TypeVar("Shared")
LEAD = 0
# The launcher knows by their beats which ranks go on, and ends all when one does not: waiting alone is no fault.
LONGEST_EXCHANGE = timedelta(days=365)


@dataclass(frozen=True)
class World:
    """This process among all; alone, every exchange is the identity."""

    rank: int = 0
    targets: int = 0
    drafters: int = 1
    # Groups of torch.distributed: the drafters for tensors and for facts, the drafters and the first target.
    _tensors: Any = field(default=None, repr=False)
    _facts: Any = field(default=None, repr=False)
    _founders: Any = field(default=None, repr=False)

    @property
    def role(self) -> Role:
        """What this rank does."""
        return role_of(self.rank, self.targets, self.drafters)

    @property
    def leads(self) -> bool:
        """Whether this rank writes what the run publishes."""
        return self.rank == LEAD

    @property
    def first_target(self) -> int:
        """The rank of the target that measures and hands out the first weights."""
        return self.drafters

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self.targets + self.drafters == 1

    def share(self, value: Any, source: int = LEAD) -> Any:
        """Return the value of rank `source` on every rank."""
        if self.alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def share_among_founders(self, value: Any) -> Any:
        """Return the value of the first target on the drafters; other targets do not take part."""
        box = [value]
        dist.broadcast_object_list(box, src=self.first_target, group=self._founders)
        return box[0]

    def hand_on(self, tensor: Tensor) -> None:
        """Overwrite a tensor (contiguous, in the host's memory) on the drafters with that of the first target."""
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=self.first_target, group=self._founders)

    def share_among_drafters(self, value: Shared) -> Shared:
        """Return the lead's value on every drafter."""
        if self.drafters == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=LEAD, group=self._facts)
        return box[0]

    def add_among_drafters(self, values: list[float]) -> list[float]:
        """Return the sums of the drafters' values, the same on each, in double precision."""
        if self.drafters == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._facts)
        return total.tolist()

    def add_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Add up each tensor over the drafters, in place."""
        if self.drafters == 1:
            return
        works = [dist.all_reduce(tensor, group=self._tensors, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    def send_out(self, owned: Iterable[tuple[int, Tensor]]) -> None:
        """Overwrite each tensor on all drafters with that of the drafter named beside it."""
        if self.drafters == 1:
            return
        works = [dist.broadcast(tensor, src=owner, group=self._tensors, async_op=True) for owner, tensor in owned]
        for work in works:
            work.wait()

    def await_drafters(self) -> None:
        """Return when every drafter has come here."""
        self.add_among_drafters([0.0])


ALONE = World()


def join(rank: int, topology: TopologyConfig, meeting_point: Path, device: str) -> World:
    """Join the other ranks, which meet at the file `meeting_point`.

    Args:
        device: the run's torch device; decides between NCCL and gloo.
    """
    if topology.processes == 1:
        return ALONE
    limit = LONGEST_EXCHANGE
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=topology.processes, timeout=limit
    )
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    drafters = list(range(topology.drafters))
    tensors = dist.new_group(drafters, backend=backend, timeout=limit)
    facts = dist.new_group(drafters, backend="gloo", timeout=limit)
    founding = dist.new_group([*drafters, topology.drafters], timeout=limit) if topology.targets else None
    return World(rank, topology.targets, topology.drafters, tensors, facts, founding)


def leave() -> None:
    """End the exchange with the other ranks, where there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()
