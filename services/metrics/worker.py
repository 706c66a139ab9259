"""What a worker's own process serves: its versions, its container's memory, and what its room counts."""

import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.errors import UserError
from services.metrics.gpu import driver_version
from services.metrics.machine import memory_metrics
from services.queue_names import Stage
from services.settings import Addresses

# The image whose job it is to work on a queue.
IMAGES: dict[Stage, str] = {
    "prepare": "tokenizer",
    "generate": "producer",
    "assemble": "tokenizer",
    "merge": "tokenizer",
    "train": "trainer",
}


class ContainerCollector(Collector):
    """Versions and memory of the container that a process of `image` runs in."""

    def __init__(self, image: str, version: str) -> None:
        self._image = image
        self._info = GaugeMetricFamily(
            "dflash_image_info",
            "What a running container holds; always 1.",
            labels=["image", "version", "python", "torch", "cuda", "driver"],
        )
        python = f"{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]}"
        self._info.add_metric([image, version, python, package_version("torch"), torch_cuda(), driver_version()], 1)

    def collect(self) -> Iterator[Metric]:
        yield self._info
        yield from memory_metrics(self._image)


def serve_worker_metrics(
    stage: Stage, addresses: Addresses, register: Callable[[CollectorRegistry], None] | None = None
) -> None:
    """Serve the container's metrics, and what `register` adds, on `addresses.metrics_port`, if that is set.

    Raises:
        UserError: the port is taken.
    """
    if addresses.metrics_port is None:
        return
    registry = container_registry(IMAGES[stage], addresses.version)
    if register is not None:
        register(registry)
    serve(registry, addresses.metrics_port)


def container_registry(image: str, version: str) -> CollectorRegistry:
    """What every container of ours serves."""
    registry = CollectorRegistry()
    registry.register(ContainerCollector(image, version))
    ProcessCollector(registry=registry)
    return registry


def serve(registry: CollectorRegistry, port: int, host: str = "0.0.0.0") -> None:
    """Answer /metrics from a thread of its own, until the process ends.

    Raises:
        UserError: the port is taken.
    """
    try:
        start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UserError(f"metrics on {host}:{port}: {error.strerror}; choose another port") from error
    structlog.get_logger().info("metrics_ready", port=port)


def package_version(name: str) -> str:
    """Version of an installed package, or "none"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def torch_cuda() -> str:
    """`torch.version.cuda`, or "none"; read from its file, as importing torch takes seconds and gigabytes."""
    try:
        source = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
        lines = source.read_text(encoding="utf-8").splitlines()
    except (metadata.PackageNotFoundError, OSError):
        return "none"
    assigned = next((line.partition("=")[2].strip() for line in lines if re.match(r"cuda\b.*=", line)), "None")
    return "none" if assigned == "None" else assigned.strip("'\"")
