"""Metrics of the machine's NVIDIA cards through NVML, for a stack without dcgm-exporter."""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

BY_CARD = ["gpu", "model"]
DRIVER = Path("/proc/driver/nvidia/version")
DRIVER_LINE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)")

# Name, help and how it is read.
VALUES: tuple[tuple[str, str, Callable[[Any, Any], float]], ...] = (
    (
        "memory_used_bytes",
        "Memory in use on a card, all processes.",
        lambda nvml, card: nvml.nvmlDeviceGetMemoryInfo(card).used,
    ),
    ("memory_size_bytes", "Memory of a card.", lambda nvml, card: nvml.nvmlDeviceGetMemoryInfo(card).total),
    (
        "busy_ratio",
        "Share of time in which a kernel ran.",
        lambda nvml, card: nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100,
    ),
    ("power_watts", "Power that a card draws.", lambda nvml, card: nvml.nvmlDeviceGetPowerUsage(card) / 1000),
    (
        "temperature_celsius",
        "Temperature of a card.",
        lambda nvml, card: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
    ),
)


def gpu_metrics() -> Iterable[Metric]:
    """Nothing where there is no driver; what a card does not answer is left out, and told in the log."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return []
    except pynvml.NVMLError:
        return []
    try:
        return _read(pynvml)
    except pynvml.NVMLError as error:
        structlog.get_logger().warning("gpus_unreadable", error=str(error))
        return []
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def driver_version(path: Path = DRIVER) -> str:
    """Version of the kernel's NVIDIA driver, which containers see too, or "none"."""
    try:
        found = DRIVER_LINE.search(path.read_text())
    except OSError:
        return "none"
    return found[1] if found else "none"


def _read(nvml: Any) -> list[Metric]:
    """Raises NVMLError when not even the number of cards is answered."""
    families = [GaugeMetricFamily(f"dflash_gpu_{name}", told, labels=BY_CARD) for name, told, _ in VALUES]
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            card = nvml.nvmlDeviceGetHandleByIndex(index)
            labels = [str(index), str(nvml.nvmlDeviceGetName(card))]
        except nvml.NVMLError as error:
            structlog.get_logger().warning("gpu_unreadable", gpu=index, error=str(error))
            continue
        for family, (_, _, read) in zip(families, VALUES, strict=True):
            try:
                family.add_metric(labels, read(nvml, card))
            except nvml.NVMLError_NotSupported:  # such as how busy a card is that is cut up by MIG
                continue
            except nvml.NVMLError as error:
                structlog.get_logger().warning("gpu_unreadable", gpu=index, metric=family.name, error=str(error))
    return [*families]
