"""What a producer's process counts of its requests and chunks. They begin anew with it; what adds up is in the files.

Prometheus takes a fall of a counter for a restart, so rates and increases are right over restarts and scaling.
"""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.live import SERVER_STATES

# From what a small model needs to a long answer of a large one that thinks.
REQUEST_BUCKETS = (0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
CHUNK_BUCKETS = (1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 21600)

# Registered by `register`, so that importing this counts for nothing elsewhere.
REQUESTS = Counter(
    "dflash_producer_requests", "Requests that ended, by how: answered, or why not.", ["outcome"], registry=None
)
REQUEST_SECONDS = Histogram(
    "dflash_producer_request_seconds",
    "From sending a prompt to its answer or error.",
    buckets=REQUEST_BUCKETS,
    registry=None,
)
CHUNK_SECONDS = Histogram(
    "dflash_producer_chunk_seconds",
    "From taking a chunk to publishing it, or giving it back.",
    buckets=CHUNK_BUCKETS,
    registry=None,
)
PROMPT_TOKENS = Counter("dflash_producer_prompt_tokens", "Prompt tokens of answered requests.", registry=None)
OUTPUT_TOKENS = Counter("dflash_producer_output_tokens", "Answer tokens of answered requests.", registry=None)


class LiveCollector(Collector):
    """What goes on in this process at the moment of the scrape; `live` is `GenerateHost.live`."""

    def __init__(self, live: Callable[[], dict[str, dict[str, Any]]]) -> None:
        self._live = live

    def collect(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "dflash_producer_in_flight_requests", "Requests that await an answer.", labels=["run", "server"]
        )
        slots = GaugeMetricFamily(
            "dflash_producer_slots", "Requests that may be in flight at once in this process.", labels=["run"]
        )
        chunks = GaugeMetricFamily("dflash_producer_open_chunks", "Chunks in work in this process.", labels=["run"])
        states = GaugeMetricFamily(
            "dflash_producer_server_state",
            "1 for the state in which this process sees a server, else 0.",
            labels=["run", "server", "state"],
        )
        for run, content in self._live().items():
            slots.add_metric([run], content["slots"])
            chunks.add_metric([run], content["chunks"])
            for server, seen in content["servers"].items():
                in_flight.add_metric([run, server], seen["in_flight"])
                for state in SERVER_STATES:
                    states.add_metric([run, server, state], seen["state"] == state)
        return iter((in_flight, slots, chunks, states))


def register(registry: CollectorRegistry, live: Callable[[], dict[str, dict[str, Any]]]) -> None:
    """Have the registry serve what this process counts and does."""
    registry.register(LiveCollector(live))
    for counted in (REQUESTS, REQUEST_SECONDS, CHUNK_SECONDS, PROMPT_TOKENS, OUTPUT_TOKENS):
        registry.register(counted)
