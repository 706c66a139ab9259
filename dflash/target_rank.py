"""What a target's process does: it computes the states of its packs, ahead of the drafters as far as its ring holds."""

from __future__ import annotations

import time

import torch

from dflash.batch import read_samples
from dflash.checkpoint import Progress
from dflash.config import TrainingConfig
from dflash.curve import Measure, acceptance_meter
from dflash.features import FeatureSource
from dflash.founding import found_data, found_target, hand_out, own_devices
from dflash.model import DraftModel
from dflash.parts import Clock
from dflash.plan import check_memory
from dflash.rank_metrics import RankMetrics
from dflash.ring import POLL_SECONDS, Ring, SlotShape, make_ring
from dflash.supply import receive_weights, send_measured
from dflash.target import Target
from dflash.world import World


def serve_states(config: TrainingConfig, world: World, clock: Clock) -> None:
    """Serve the drafters until they take no more packs. The counterpart of `train.train`, exchange by exchange."""
    devices = own_devices(config, world.rank)
    planned = check_memory(config, world.role, devices)
    target = found_target(config, devices)
    draft = hand_out(config, world, target)
    data = found_data(config, world, None)
    taps: tuple[int, ...] = world.share(draft and draft.architecture.target_layer_ids, world.first_target) or ()
    ring, address = make_ring(_slot_shape(config, target, taps), config.topology.look_ahead_bytes, _on_gpu(target))
    for rank in range(world.drafters, world.drafters + world.targets):
        world.share(address, rank)
    progress: Progress | None = world.share(None)
    assert progress is not None
    measure = None
    if draft is not None and config.acceptance is not None:
        draft = draft.to(target.device)
        measure = acceptance_meter(config, data.dataset, target, taps, clock.beat)
    measurements = _Measurements(ring, draft, measure)

    metrics = RankMetrics(config, world, clock, planned)
    source = FeatureSource(target, taps, config.feature_cache_bytes, config.objective.needs_teacher)
    first, last = progress.step * config.step_packs, config.steps * config.step_packs
    for number, (pack, _) in zip(range(first, last), data.order.packs_from(progress.cursor), strict=False):
        turn, index = divmod(number, world.targets)
        if index != world.rank - world.drafters:
            continue
        samples = read_samples(data.dataset, pack, config)
        with clock.part("target_forward"):
            states = source.states(pack.rows, samples)
        with clock.part("data_wait"):
            if not ring.await_slot(turn, measurements.go_on):
                break
        with clock.part("transfer"):
            ring.put(turn, number, states)
        metrics.count(tokens=len(states.features), samples=len(samples))
        metrics.write_if_due(number // config.step_packs)
    with clock.part("data_wait"):
        while measurements.go_on():
            time.sleep(POLL_SECONDS)
    metrics.write()


class _Measurements:
    """The measurements that the lead asks for, made while the target waits for a slot."""

    def __init__(self, ring: Ring, draft: DraftModel | None, measure: Measure | None) -> None:
        self._ring, self._draft, self._measure, self._made = ring, draft, measure, 0

    def go_on(self) -> bool:
        """Make a measurement if one is asked for; return whether the drafters still take packs."""
        if self._ring.asked > self._made:
            assert self._draft is not None
            assert self._measure is not None
            receive_weights(self._draft)
            send_measured(self._measure(self._draft))
            self._made += 1
        return not self._ring.closed


def _slot_shape(config: TrainingConfig, target: Target, taps: tuple[int, ...]) -> SlotShape:
    hidden = target.embedding.embedding_dim
    final = hidden if config.objective.needs_teacher else 0
    return SlotShape(config.token_budget, len(taps) * hidden, final, getattr(torch, config.target_dtype))


def _on_gpu(target: Target) -> bool:
    return target.device.type == "cuda"
