"""What a machine needs for a run: rates of target and drafter on one device, and the best split of its devices.

One target, on as many devices as the run gives it, and one drafter are timed on packs of the run's own dataset. What
the split adds is not: the exchange of gradients among drafters, and the way of the states through host memory, which
overlaps with the drafter's work.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from dflash.attention_choice import choose_attention
from dflash.batch import PackContent, read_pack
from dflash.config import TrainingConfig
from dflash.errors import DflashError
from dflash.features import FeatureSource, TargetStates
from dflash.founding import found_data, found_target
from dflash.initialize import initialize
from dflash.model import DraftModel
from dflash.optimizer import ShardedAdamW
from dflash.pack import build_pack
from dflash.packing import Cursor
from dflash.step import accumulate_gradient
from dflash.target import Target, TargetEnds
from dflash.world import ALONE

# Different packs in memory at once, whose states the drafter is timed on.
PACKS = 4


class Rates(NamedTuple):
    """Seconds of one pack on one device: the target's forward; the drafter's gradient; a step of the optimizer."""

    target: float
    gradient: float
    optimizer: float


class Work(NamedTuple):
    """What there is to do: packs of one epoch, packs of the configured steps, and tokens of an average pack."""

    epoch_packs: int
    run_packs: int
    pack_tokens: float


class Split(NamedTuple):
    """A topology and the packs a second that it should do; `targets` 0 is colocated."""

    targets: int
    drafters: int
    packs_per_second: float
    waits: str


def probe(config: TrainingConfig, devices: int, seconds: float) -> tuple[Rates, Work]:
    """Time the target and a drafter for about half of `seconds` each, loading and the first pack of each not counted.

    Raises DflashError for an unusable target or dataset, or too few `devices` for a target of several cards.
    """
    cards = config.topology.cards_per_target
    if 1 < cards >= devices:
        raise DflashError(f"{devices} devices: a target of {cards} and a drafter need {cards + 1}")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = found_target(config, [f"cuda:{i}" for i in range(cards)] if config.device == "cuda" else [config.device])
    data = found_data(config, ALONE, target.embedding.num_embeddings)
    model = initialize(config.draft, target, config.seed).to(target.device)
    epoch = list(itertools.takewhile(lambda item: item[0].epoch == 0, data.order.packs_from(Cursor())))
    contents = [read_pack(data.dataset, pack, config) for pack, _ in epoch[:PACKS]]
    states, target_seconds = _time_target(config, target, model, contents, seconds / 2)
    ends = TargetEnds(target.embedding, target.head, config.target)
    # A card that holds the target has no room for a drafter's optimizer as well.
    del target
    gc.collect()
    if ends.device.type == "cuda":
        torch.cuda.empty_cache()

    optimizer = ShardedAdamW(model, config, ALONE)
    attention, _ = choose_attention(config, model.architecture, ends.device, ALONE)

    def gradient(index: int) -> None:
        optimizer.begin()
        pack = build_pack(contents[index].samples, contents[index].anchors, ends.device)
        accumulate_gradient(model, ends, pack, _to(ends.device, states[index]), config, attention=attention)

    def update(_index: int) -> None:
        optimizer.clip()
        optimizer.step(0.0)

    gradient_seconds = _time(gradient, len(contents), seconds / 2)
    optimizer_seconds = _time(update, 1, seconds / 20)
    tokens = sum(int(data.dataset.lengths[pack.rows].clip(max=config.max_length).sum()) for pack, _ in epoch)
    work = Work(len(epoch), config.steps * config.step_packs, tokens / len(epoch))
    return Rates(target_seconds, gradient_seconds, optimizer_seconds), work


def _time_target(
    config: TrainingConfig, target: Target, model: DraftModel, contents: list[PackContent], seconds: float
) -> tuple[list[TargetStates], float]:
    """Return the states of some packs, in the host's memory, and the seconds that one takes."""
    taps = model.architecture.target_layer_ids
    source = FeatureSource(target, taps, 0, config.objective.needs_teacher)
    states = [_to(torch.device("cpu"), source.states(content.rows, content.samples)) for content in contents]
    taken = _time(lambda i: source.states(contents[i].rows, contents[i].samples), len(contents), seconds)
    return states, taken


def _to(device: torch.device, states: TargetStates) -> TargetStates:
    return TargetStates(states.features.to(device), None if states.final is None else states.final.to(device))


def splits(rates: Rates, devices: int, cards_per_target: int = 1) -> list[Split]:
    """Return every topology of `devices` devices with a pack a drafter and step, the fastest first.

    Colocated comes last: it is possible only where one device holds target and drafter.
    """
    found = []
    for targets in range(1, (devices - 1) // cards_per_target + 1):
        drafters = devices - targets * cards_per_target
        made, used = targets / rates.target, drafters / (rates.gradient + rates.optimizer)
        share = abs(made - used) / max(made, used)
        waits = f"{'drafters' if made < used else 'targets'} wait {share:.0%} of the time"
        found.append(Split(targets, drafters, min(made, used), waits))
    if cards_per_target > 1:
        return sorted(found, key=lambda split: -split.packs_per_second)
    colocated = Split(0, devices, devices / sum(rates), "where one device holds both")
    return [*sorted(found, key=lambda split: -split.packs_per_second), colocated]


def _time(work: Callable[[int], object], count: int, seconds: float) -> float:
    """Return the mean seconds of `work(0)`, `work(1)`, ... after one that is not counted."""
    work(0)
    _synchronize()
    start, done = time.monotonic(), 0
    while done < count or time.monotonic() - start < seconds:
        work(done % count)
        _synchronize()
        done += 1
    return (time.monotonic() - start) / done


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
