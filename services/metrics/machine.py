"""Metrics of the container and disk that a process sees: memory as its cgroup counts it, and free space."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

CGROUP = Path("/sys/fs/cgroup")


def memory_metrics(image: str, root: Path = CGROUP) -> Iterable[Metric]:
    """Memory of this container; no series where the kernel counts none."""
    family = GaugeMetricFamily(
        "dflash_container_memory_bytes",
        "Memory of a container: working_set is what the kernel cannot take back, limit what it may use.",
        labels=["image", "kind"],
    )
    for kind, value in read_memory(root).items():
        family.add_metric([image, kind], value)
    return [family]


def disk_metrics(path: Path) -> Iterable[Metric]:
    """Size and free space of the file system of all runs; nothing when the folder cannot be asked."""
    size = GaugeMetricFamily("dflash_disk_size_bytes", "Size of the disk that holds the runs.")
    free = GaugeMetricFamily("dflash_disk_free_bytes", "What an unprivileged process may still write there.")
    with suppress(OSError):
        found = os.statvfs(path)
        size.add_metric([], found.f_frsize * found.f_blocks)
        free.add_metric([], found.f_frsize * found.f_bavail)
    return [size, free]


def read_memory(root: Path) -> dict[str, int]:
    """Bytes by kind (working_set, peak, limit), from version 2 or 1 of the kernel's cgroup files."""
    for folder, usage, peak, limit, reclaimable in (
        (root, "memory.current", "memory.peak", "memory.max", "inactive_file"),
        (
            root / "memory",
            "memory.usage_in_bytes",
            "memory.max_usage_in_bytes",
            "memory.limit_in_bytes",
            "total_inactive_file",
        ),
    ):
        used = _number(folder / usage)
        if used is None:
            continue
        found = {"working_set": max(0, used - _from_stat(folder / "memory.stat", reclaimable))}
        if (most := _number(folder / peak)) is not None:
            found["peak"] = most
        # Without a limit of its own, a container may use what the machine has.
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["limit"] = min(_number(folder / limit) or machine, machine)
        return found
    return {}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is none, or it says "max"
        return None


def _from_stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
