"""Metrics of what the operator decided: required versions, memory budgets, and which release runs since when.

VERSIONS                    images/versions.toml
OPERATIONS/budgets.json     {"budgets": [{"service": "trainer", "device": "0", "bytes": 1000000}, ...]}
OPERATIONS/releases.jsonl   a JSON object a line, with `image`, `version` and `at` (ISO 8601)
"""

import json
import tomllib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

Fill = Callable[[Path, GaugeMetricFamily], None]


def operations_metrics(versions: Path, operations: Path) -> Iterator[Metric]:
    """Of a file that is not there, nothing; one that cannot be read is told by a metric."""
    unreadable = GaugeMetricFamily(
        "dflash_operations_unreadable", "Whether an operator's file cannot be read.", labels=["file"]
    )
    required = GaugeMetricFamily(
        "dflash_required_version_info", "What versions.toml asks of an image; 1.", labels=["image", "torch", "cuda"]
    )
    budgets = GaugeMetricFamily(
        "dflash_memory_budget_bytes", "Memory that a service may use on a device.", labels=["service", "device"]
    )
    releases = GaugeMetricFamily(
        "dflash_release_timestamp_seconds", "When a version of an image was put in place.", labels=["image", "version"]
    )
    files: tuple[tuple[Path, GaugeMetricFamily, Fill], ...] = (
        (versions, required, _add_required),
        (operations / "budgets.json", budgets, _add_budgets),
        (operations / "releases.jsonl", releases, _add_releases),
    )
    for path, family, fill in files:
        if not path.is_file():
            continue
        try:
            fill(path, family)
        except (OSError, ValueError, KeyError, TypeError) as error:
            structlog.get_logger().warning("operations_unreadable", file=str(path), error=str(error))
            unreadable.add_metric([path.name], 1)
        else:
            unreadable.add_metric([path.name], 0)
            yield family
    yield unreadable


def _add_required(path: Path, family: GaugeMetricFamily) -> None:
    wanted = {
        (image, str(variant.get("torch", "none")), str(variant.get("cuda", "none")))
        for image, variants in tomllib.loads(path.read_text(encoding="utf-8")).items()
        for variant in variants.values()
    }
    for labels in sorted(wanted):
        family.add_metric(labels, 1)


def _add_budgets(path: Path, family: GaugeMetricFamily) -> None:
    for budget in json.loads(path.read_text(encoding="utf-8"))["budgets"]:
        family.add_metric([str(budget["service"]), str(budget["device"])], float(budget["bytes"]))


def _add_releases(path: Path, family: GaugeMetricFamily) -> None:
    newest: dict[tuple[str, str], float] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        release = json.loads(line)
        newest[str(release["image"]), str(release["version"])] = datetime.fromisoformat(release["at"]).timestamp()
    for labels, at in newest.items():
        family.add_metric(labels, at)
