"""Panels and alerts on the Prometheus of a live stack: Redis, two servers, workers, exporters, and runs that go on.

The servers are fakes, which answer at a chosen pace and can be made to hang; tests/services/test_sglang.py checks that
the real one exposes the metrics that are used of it. Ranks are written as the trainer writes them.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from rq.job import Job
from rq.serializers import JSONSerializer

from services.queues import enqueue, queue
from services.runs import Run, read_settings
from services.stack.reconcile import reconcile
from tests.monitoring.bring_up import Live, bring_up
from tests.monitoring.expressions import metrics_of, panel_expressions, rule_expressions, used_metrics
from tests.monitoring.live import post, wait_until, wait_until_none
from tests.monitoring.prometheus import CONFIG, Prometheus
from tests.monitoring.runs import WrittenRank, make_run

# A rank of our own NVML exporter is seen on cards alone, and dcgm-exporter's metrics take its place here.
ONLY_BY_NVML = {
    "dflash_gpu_busy_ratio",
    "dflash_gpu_memory_size_bytes",
    "dflash_gpu_memory_used_bytes",
    "dflash_gpu_power_watts",
    "dflash_gpu_temperature_celsius",
}
SECONDS = 300


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with bring_up(tmp_path_factory.mktemp("live"), fast=True) as live:
        yield live


@pytest.fixture(scope="module")
def merged(live: Live) -> Live:
    """The same stack when its short run is assembled and merged and enough was scraped for every rate."""
    short = live.run("short")
    wait_until(lambda: all(short.assembled(path.stem).is_file() for path in _chunks(short)), SECONDS, "not assembled")
    enqueue("merge", live.redis, "merge", "short", job_timeout=60)
    wait_until(short.merged.is_file, SECONDS, "not merged")
    wait_until(lambda: live.prometheus.value("count(dflash_merge_samples)") is not None, SECONDS, "not scraped")
    wait_until(lambda: _is_going(live.prometheus), SECONDS, "nothing is generated")
    return live


def _chunks(run: Run) -> list[Path]:
    return [Path(chunk["chunk"]) for chunk in json.loads(run.chunks.read_text())["chunks"]]


def _is_going(prometheus: Prometheus) -> bool:
    left = prometheus.value('run:dflash_generation_left:seconds{run="long"}')
    return left is not None and prometheus.value("disk:dflash_disk_left:seconds") is not None


def _has_data(prometheus: Prometheus, expr: str) -> bool:
    return any(not math.isnan(float(series["value"][1])) for series in prometheus.query(expr))


def test_every_panel_shows_data_and_none_needs_a_metric_that_nobody_exposes(merged: Live) -> None:
    prometheus = merged.prometheus
    of_cards = [found for found in panel_expressions() if found.panel and found.panel.empty_without_gpu]
    of_others = [found for found in panel_expressions() if found.panel and not found.panel.empty_without_gpu]

    def without_data() -> list[str]:
        return [found.where for found in of_others if not _has_data(prometheus, found.expr)]

    wait_until_none(without_data, 60, "without data: ")
    measured = {found.where for found in of_cards if _has_data(prometheus, found.expr)}
    assert {where for where in measured if "idle process" not in where} == set(), "shown without a card"

    # What a machine with cards has beside this.
    merged.stack.serve_cards()
    merged.ranks["trained"].held = 60 * 2**30

    def without_cards() -> list[str]:
        return [found.where for found in of_cards if not _has_data(prometheus, found.expr)]

    wait_until_none(without_cards, 60, "without data: ")

    def missing() -> set[str]:
        return {name for name in used_metrics() - ONLY_BY_NVML if not prometheus.query(name)}

    wait_until_none(missing, 60, "exposed by nobody: ")


def test_every_rule_is_evaluated_and_names_what_is_there(merged: Live) -> None:
    for found in rule_expressions():
        merged.prometheus.query(found.expr)
        assert metrics_of(found.expr)
    states = merged.prometheus.rule_health()
    assert set(states) == {found.where for found in rule_expressions()}
    assert set(states.values()) == {"ok"}


class Fault(NamedTuple):
    """How to provoke an alert, and how to put it right."""

    provoke: Callable[[], object]
    undo: Callable[[], object]


def _faults(live: Live) -> dict[str, Fault]:
    """All but DiskNearlyFull, which takes a full disk; its rule test shows it."""
    trained, redis = live.ranks["trained"], live.redis

    def hang(hanging: bool) -> None:
        for server in live.servers:
            post(f"{server}/fake/hang", {"hanging": hanging})

    def swap_torch(version: str) -> None:
        text = live.versions.read_text()
        live.versions.write_text(text.replace('torch = "2.13.0+cpu"', f'torch = "{version}"'))

    def back_to_torch(version: str) -> None:
        text = live.versions.read_text()
        live.versions.write_text(text.replace(f'torch = "{version}"', 'torch = "2.13.0+cpu"'))

    def take_away_worker() -> None:
        live.stack.kill("merger")
        for key in redis.smembers("rq:workers:merge"):
            redis.srem("rq:workers:merge", key)
            redis.delete(key)
        for number in range(3):
            enqueue("merge", redis, "merge", f"nobody-{number}", job_timeout=60)
        for job in queue("merge", redis).get_jobs():
            job.enqueued_at = datetime.now(UTC) - timedelta(hours=2)
            job.save()

    def bring_back_worker() -> None:
        live.stack.restart("merger")
        # Jobs of runs that there are not fail at once.
        wait_until(lambda: queue("merge", redis).count == 0, 60, "the queue does not drain")

    def stick(run: bool) -> None:
        of_stage = queue("assemble", redis)
        if not run:
            redis.zrem(of_stage.started_job_registry.key, "stuck:1")
            redis.delete("rq:execution:stuck:1")
            return
        # Not by way of the queue, where the assembler would take it.
        job = Job.create("nothing", id="stuck", timeout=100, connection=redis, serializer=JSONSerializer)
        job.started_at = datetime.now(UTC) - timedelta(seconds=80)
        job.save()
        redis.zadd(of_stage.started_job_registry.key, {"stuck:1": time.time() + 3600})
        redis.set("rq:execution:stuck:1", "", ex=3600)

    def run_training_job(runs: bool) -> None:
        registry = queue("train", redis).started_job_registry.key
        if runs:
            redis.zadd(registry, {"training:1": time.time() + 3600})
            redis.set("rq:execution:training:1", "", ex=3600)
        else:
            redis.zrem(registry, "training:1")
            redis.delete("rq:execution:training:1")

    def set_rank(rank: WrittenRank, **values: object) -> None:
        for name, value in values.items():
            setattr(rank, name, value)

    def stop_training() -> None:
        run_training_job(True)
        live.stopped.add(trained)

    def go_on_training() -> None:
        live.stopped.discard(trained)

    late = live.ranks["saved-long-ago"]
    used = int(redis.info("memory")["used_memory"])
    return {
        "GenerationStalled": Fault(lambda: hang(True), lambda: hang(False)),
        "ServerHung": Fault(lambda: None, lambda: None),
        "WorkerLost": Fault(take_away_worker, bring_back_worker),
        "QueueNotDraining": Fault(lambda: None, lambda: None),
        "ChunkStuck": Fault(lambda: stick(True), lambda: stick(False)),
        "RedisMemoryHigh": Fault(
            lambda: redis.config_set("maxmemory", int(used * 1.2)), lambda: redis.config_set("maxmemory", 2**28)
        ),
        "RedisPersistenceFailing": Fault(
            lambda: redis.config_set("appendonly", "no"), lambda: redis.config_set("appendonly", "yes")
        ),
        "GpuMemoryAboveBudget": Fault(
            lambda: set_rank(trained, held=80 * 2**30), lambda: set_rank(trained, held=60 * 2**30)
        ),
        "VersionUnexpected": Fault(lambda: swap_torch("2.14.0"), lambda: back_to_torch("2.14.0")),
        "TrainingStalled": Fault(stop_training, go_on_training),
        "LossNotFinite": Fault(lambda: set_rank(late, finite=False), lambda: set_rank(late, finite=True)),
        "AcceptanceDown": Fault(lambda: set_rank(late, acceptance=1.2), lambda: set_rank(late, acceptance=2.1)),
        "CheckpointTooOld": Fault(
            lambda: set_rank(late, saved_at=time.time() - 10000), lambda: set_rank(late, saved_at=time.time())
        ),
        "TargetDown": Fault(lambda: live.stack.kill("node-exporter"), lambda: live.stack.restart("node-exporter")),
    }


def _wait_for(prometheus: Prometheus, wanted: set[str], there: bool) -> None:
    """Until all of these alerts fire, or none of them does."""

    def open_ones() -> set[str]:
        return wanted - prometheus.firing() if there else wanted & prometheus.firing()

    wait_until_none(open_ones, SECONDS, "do not fire: " if there else "still fire: ")


def test_too_many_bad_answers_are_told_and_forgotten_after_the_hour(merged: Live) -> None:
    run = make_run(merged.stack.runs, "worse", merged.target, 800, bad=True)
    reconcile(run, read_settings(run), merged.redis)
    _wait_for(merged.prometheus, {"RejectionRateHigh", "FailureRateHigh"}, there=True)
    _wait_for(merged.prometheus, {"RejectionRateHigh", "FailureRateHigh"}, there=False)


def test_each_alert_fires_on_its_fault_and_clears_after_it(merged: Live) -> None:
    faults = _faults(merged)
    # The disk is the machine's, and others write to it.
    wait_until_none(lambda: merged.prometheus.firing() - {"DiskNearlyFull"}, SECONDS, "fire at rest: ")
    try:
        for fault in faults.values():
            fault.provoke()
        _wait_for(merged.prometheus, set(faults), there=True)
    finally:
        for fault in faults.values():
            fault.undo()
    _wait_for(merged.prometheus, set(faults), there=False)


def test_servers_that_are_gone_leave_slots_empty_until_they_are_back(merged: Live) -> None:
    for number in range(2):
        merged.stack.kill(f"server-{number}")
    _wait_for(merged.prometheus, {"SlotsEmpty", "TargetDown"}, there=True)
    for number in range(2):
        merged.stack.restart(f"server-{number}")
    _wait_for(merged.prometheus, {"SlotsEmpty", "TargetDown"}, there=False)


def test_without_its_exporter_the_gap_shows_and_the_counts_are_right_after_it(merged: Live) -> None:
    prometheus = merged.prometheus
    counter = 'sum(dflash_output_tokens_total{run="long"})'
    before = prometheus.value(counter)
    merged.stack.kill("exporter")
    wait_until(lambda: prometheus.value(counter) is None, 60, "the exporter's metrics are still there")
    merged.stack.restart("exporter")
    wait_until(lambda: prometheus.value(counter) is not None, 60, "the exporter is not back")
    after = prometheus.value(counter)
    assert before is not None
    assert after is not None
    assert after >= before
    assert prometheus.value(f"resets({counter}[2m:1s])") == 0, "it went backwards in a graph"


def test_all_alerts_but_the_disks_are_provoked_here(merged: Live) -> None:
    rules = yaml.safe_load((CONFIG / "rules" / "alerts.yml").read_text())
    names = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert names - set(_faults(merged)) == {"SlotsEmpty", "RejectionRateHigh", "FailureRateHigh", "DiskNearlyFull"}
