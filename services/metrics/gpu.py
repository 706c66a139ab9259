"""Metrics of the machine's NVIDIA cards through NVML, for a stack without dcgm-exporter."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

BY_CARD = ["gpu", "model"]
DRIVER = Path("/proc/driver/nvidia/version")
DRIVER_LINE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)")


def gpu_metrics() -> Iterable[Metric]:
    """Nothing where there is no driver; a card that does not answer is left out, and told in the log."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return []
    except pynvml.NVMLError:
        return []
    try:
        return list(_read(pynvml))
    finally:
        pynvml.nvmlShutdown()


def driver_version(path: Path = DRIVER) -> str:
    """Version of the kernel's NVIDIA driver, which containers see too, or "none"."""
    try:
        found = DRIVER_LINE.search(path.read_text())
    except OSError:
        return "none"
    return found[1] if found else "none"


def _read(nvml: Any) -> Iterable[Metric]:
    used = GaugeMetricFamily("dflash_gpu_memory_used_bytes", "Memory in use on a card, all processes.", labels=BY_CARD)
    size = GaugeMetricFamily("dflash_gpu_memory_size_bytes", "Memory of a card.", labels=BY_CARD)
    busy = GaugeMetricFamily("dflash_gpu_busy_ratio", "Share of time in which a kernel ran.", labels=BY_CARD)
    power = GaugeMetricFamily("dflash_gpu_power_watts", "Power that a card draws.", labels=BY_CARD)
    heat = GaugeMetricFamily("dflash_gpu_temperature_celsius", "Temperature of a card.", labels=BY_CARD)
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            card = nvml.nvmlDeviceGetHandleByIndex(index)
            labels = [str(index), str(nvml.nvmlDeviceGetName(card))]
            memory = nvml.nvmlDeviceGetMemoryInfo(card)
            values = (
                memory.used,
                memory.total,
                nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100,
                nvml.nvmlDeviceGetPowerUsage(card) / 1000,
                nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
            )
        except nvml.NVMLError as error:
            structlog.get_logger().warning("gpu_unreadable", gpu=index, error=str(error))
            continue
        for family, value in zip((used, size, busy, power, heat), values, strict=True):
            family.add_metric(labels, value)
    return [used, size, busy, power, heat]
