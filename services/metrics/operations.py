"""Metrics of what the operator decided and recorded: required versions, releases, and memory budgets.

VERSIONS      images/versions.toml
RELEASES      releases.jsonl, a JSON object a line: an image that was put in place (`event` done), or whose memory was
              measured (measured). `role` is the service, `to` the image, `budget` the bytes that an idle process of
              it holds, by device ("resident" for the host, "card N") and stage of its start.
"""

import json
import tomllib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from services.metrics.renderable import renderable


def operations_metrics(versions: Path, releases: Path) -> Iterator[Metric]:
    """Of a file that is not there, nothing; one that cannot be read is told by a metric."""
    unreadable = GaugeMetricFamily(
        "dflash_operations_unreadable", "Whether an operator's file cannot be read.", labels=["file"]
    )
    for path, read in ((versions, _required), (releases, _releases)):
        try:
            yield from renderable(read(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            structlog.get_logger().warning("operations_unreadable", file=str(path), error=str(error))
            unreadable.add_metric([path.name], 1)
        else:
            unreadable.add_metric([path.name], 0)
    yield unreadable


def _required(path: Path) -> list[Metric]:
    required = GaugeMetricFamily(
        "dflash_required_version_info", "What versions.toml asks of an image; 1.", labels=["image", "torch", "cuda"]
    )
    wanted = {
        (image, str(variant.get("torch", "none")), str(variant.get("cuda", "none")))
        for image, variants in tomllib.loads(path.read_text(encoding="utf-8")).items()
        for variant in variants.values()
    }
    for labels in sorted(wanted):
        required.add_metric(labels, 1)
    return [required]


def _releases(path: Path) -> list[Metric]:
    changes = GaugeMetricFamily(
        "dflash_release_timestamp_seconds",
        "When an image was put in place of another.",
        labels=["service", "reference"],
    )
    budgets = GaugeMetricFamily(
        "dflash_memory_budget_bytes",
        "Memory that an idle process of the service's image held when it was measured.",
        labels=["service", "device", "stage"],
    )
    changed: dict[tuple[str, str], float] = {}
    held: dict[str, dict[str, dict[str, int]]] = {}
    text = path.read_text(encoding="utf-8")
    # A last line without its end is being written.
    for line in text[: text.rfind("\n") + 1].splitlines():
        entry = json.loads(line)
        if entry["event"] == "done":
            changed[entry["role"], entry["to"]["reference"]] = datetime.fromisoformat(entry["when"]).timestamp()
        if entry["event"] in {"done", "measured"} and entry["budget"]:
            held[entry["role"]] = entry["budget"]
    for labels, at in changed.items():
        changes.add_metric(labels, at)
    for service, by_device in held.items():
        for device, by_stage in by_device.items():
            name = "host" if device == "resident" else device.removeprefix("card ")
            for stage, size in by_stage.items():
                budgets.add_metric([service, name, stage], size)
    return [changes, budgets]
