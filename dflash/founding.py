"""How the ranks of a run begin: who loads what, and what is handed on.

The target's ranks load the target; the first of them makes the untrained drafter, as a warm start needs the target's
layers, and hands it out with the embedding and the head. So a drafter's card and memory never hold the target.
"""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dflash.architecture import Architecture
from dflash.config import TrainingConfig
from dflash.data import Dataset, check_vocabulary, open_dataset, trainable_rows
from dflash.errors import DflashError
from dflash.initialize import initialize
from dflash.model import DraftModel
from dflash.packing import DataOrder, PackLimits
from dflash.sources import epoch_rows, mix
from dflash.target import Target, TargetEnds, load_target
from dflash.world import World


class Foundation(NamedTuple):
    """The untrained drafter, and the ends of the target on the drafter's device."""

    model: DraftModel
    ends: TargetEnds


class Data(NamedTuple):
    """The dataset, the rows of it that can be trained on, and the order of their packs."""

    dataset: Dataset
    rows: NDArray[np.int64]
    order: DataOrder


class _Foretold(NamedTuple):
    """What is known before the tensors come: the drafter's, by `names`, the embedding's and, unless tied, the head."""

    architecture: Architecture
    names: list[str]
    embedding: nn.Embedding
    kinds: list[tuple[torch.Size, torch.dtype]]


def own_devices(config: TrainingConfig, rank: int) -> list[str]:
    """Return the devices of a rank, several for a target on several cards; `cuda` is the cards that it has."""
    cards = config.topology.cards_of(rank)
    return [f"cuda:{card}" for card in cards] if config.device == "cuda" else [config.device] * len(cards)


def check_cards(config: TrainingConfig, there: int) -> None:
    """Raise DflashError when the topology needs more cards than are `there`."""
    topology = config.topology
    if config.device == "cuda" and topology.cards > there:
        raise DflashError(
            f"topology needs {topology.cards} cards (drafters: {topology.drafters}; targets: {topology.targets}, cards "
            f"of each: {topology.cards_per_target}), and {there} are here: lower drafters, targets or cards_per_target"
        )


def found_target(config: TrainingConfig, devices: list[str]) -> Target:
    """Load the target as the run wants it; on several devices its layers are split over them."""
    return load_target(config.target, getattr(torch, config.target_dtype), *devices)


def hand_out(config: TrainingConfig, world: World, target: Target) -> DraftModel | None:
    """As a target, give the drafters what they begin with; the first target returns it, in the host's memory."""
    if world.rank != world.first_target:
        return None
    model = initialize(config.draft, target, config.seed)
    weight = target.embedding.weight
    tensors = [*model.state_dict().values(), weight, *([] if target.head is weight else [target.head])]
    # Some families scale or pad in the embedding: the module goes too, but for its weight.
    embedding = deepcopy(target.embedding, {id(weight): nn.Parameter(torch.empty(0), requires_grad=False)}).cpu()
    kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
    world.share_among_founders(_Foretold(model.architecture, list(model.state_dict()), embedding, kinds))
    for tensor in tensors:
        world.hand_on(tensor.detach().cpu().contiguous())
    return model


def receive(config: TrainingConfig, world: World, device: str) -> Foundation:
    """As a drafter, take what the first target gives, tensor by tensor onto `device`."""
    foretold: _Foretold | None = world.share_among_founders(None)
    assert foretold is not None

    def take(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        world.hand_on(tensor)
        return tensor.to(device)

    tensors = [take(*kind) for kind in foretold.kinds]
    with torch.device("meta"):
        model = DraftModel(foretold.architecture)
    names = foretold.names
    model.load_state_dict(dict(zip(names, tensors, strict=False)), assign=True)
    weight, *head = tensors[len(names) :]
    embedding = foretold.embedding.to(device)
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    return Foundation(model, TargetEnds(embedding, head[0] if head else embedding.weight, config.target))


def found_data(config: TrainingConfig, world: World, vocab_size: int | None) -> Data:
    """Open the dataset on every rank; the lead alone reads all of it, to check it and to find what can be trained on.

    Args:
        vocab_size: the target's, on the lead.

    Raises DflashError for an unusable dataset.
    """
    dataset = open_dataset(config.dataset, check=world.leads)
    rows = None
    if world.leads:
        assert vocab_size is not None
        check_vocabulary(dataset, vocab_size)
        rows = trainable_rows(dataset, config.max_length)
        if not len(rows):
            raise DflashError(f"{config.dataset}: no sample has two supervised tokens in a row to train on")
    rows = world.share(rows)
    assert rows is not None
    lengths = dataset.lengths.clip(max=config.max_length)
    sources = mix(dataset, rows, lengths, config.mixture)
    limits = PackLimits(config.token_budget, config.max_batch_size)
    order = DataOrder(lambda epoch: epoch_rows(sources, config.seed, epoch), lengths, limits, config.seed)
    return Data(dataset, rows, order)
