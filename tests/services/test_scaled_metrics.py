"""Counts stay right while producers come, go and are killed, and Redis loses all that it held."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from services.ledger import GenerateCounts, count_generated, total
from services.metrics.collector import StackCollector
from services.queues import enqueue_missing
from services.runs import Run
from services.settings import Addresses
from services.stack.demo.processes import free_port
from services.stack.reconcile import reconcile
from tests.making_runs import MakeRun
from tests.services.fake_sglang import FakeSglang
from tests.services.test_threaded_worker import wait_until

ROOT = Path(__file__).parents[2]
CHUNKS, CONCURRENCY = 40, 6
PROMPTS = [[first % 90 + 3, first // 90 + 3] for first in range(CHUNKS * 6)]


class Producer:
    """A producer's worker as its container runs it, and what its /metrics tells."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "services.stack", "worker", "generate"]
        environment = {**os.environ, "DFLASH_METRICS_PORT": str(self.port), "DFLASH_GRACE": "5"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment)

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait(20)

    def sum_of(self, name: str) -> float:
        """Over all series of the name; 0 while nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as response:
                text = response.read().decode()
        except OSError:
            return 0
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def _exported(registry: CollectorRegistry) -> dict[str, float]:
    """The sums of the exporter's counters over their labels."""
    sums: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def _check(registry: CollectorRegistry, run: Run) -> GenerateCounts:
    """What is exported lies between what the files held before and after the scrape. Returns the latter."""
    before = total(count_generated(run).values())
    sums = _exported(registry)
    after = total(count_generated(run).values())
    finished = sums["dflash_completions_total"] + sums["dflash_journaled_prompts"]
    assert before.finished + before.in_journal <= finished <= after.finished + after.in_journal
    assert before.output_tokens <= sums["dflash_output_tokens_total"] <= after.output_tokens
    assert before.attempts <= sums["dflash_attempts_total"] <= after.attempts
    assert sums["dflash_prompts"] == len(PROMPTS)
    return after


def test_counts_equal_the_files_with_one_four_and_two_producers(
    redis: Redis, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, settings = make_run(PROMPTS, chunks=CHUNKS, concurrency=CONCURRENCY)
    registry = CollectorRegistry()
    registry.register(StackCollector(Addresses()))
    producers: list[Producer] = []

    def in_flight() -> float:
        return sum(producer.sum_of("dflash_producer_in_flight_requests") for producer in producers)

    def finished() -> int:
        counts = total(count_generated(run).values())
        return counts.finished + counts.in_journal

    def work_with(count: int, so_far: Callable[[], int], until: int) -> None:
        """So many producers have all their slots in use, and go on until so many prompts are finished."""
        wait_until(lambda: in_flight() == count * CONCURRENCY, 60)
        wait_until(lambda: so_far() >= until, 60)
        _check(registry, run)

    with FakeSglang(seconds=1.0) as server:
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        enqueue_missing("generate", redis, "generate", [("r", f"s-{n}") for n in range(CHUNKS)], job_timeout=60)
        try:
            producers.append(Producer())
            work_with(1, finished, 6)
            producers += [Producer() for _ in range(3)]
            work_with(4, finished, 30)
            producers.pop(0).end(signal.SIGKILL)
            producers.pop(0).end(signal.SIGTERM)
            # What the killed one had is found at once, and not when its last sign of life is too old.
            redis.flushall()
            reconcile(run, settings, redis)
            work_with(2, finished, 60)
            server.seconds = 0.01
            wait_until(lambda: total(count_generated(run).values()).chunks_done == CHUNKS, 60)
            wait_until(lambda: in_flight() == 0)
            after = _check(registry, run)
            answered = [producer.sum_of("dflash_producer_requests_total") for producer in producers]
        finally:
            for producer in producers:
                producer.process.kill()
                producer.process.wait()
    sums = _exported(registry)
    assert sums["dflash_completions_total"] == after.completed == len(PROMPTS)
    assert sums["dflash_attempts_total"] == len(PROMPTS)
    assert sums["dflash_output_tokens_total"] == 3 * len(PROMPTS)
    # Of those that ended, one was killed: its requests in flight were asked again.
    assert 0 < sum(answered) < len(PROMPTS) <= sum(server.asked.values()) <= len(PROMPTS) + CONCURRENCY
