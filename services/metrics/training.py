"""Metrics of training: each rank writes its own to TRAIN/metrics/rank-N.prom, and they are served with their run.

A file is replaced whole at each of the rank's log intervals. That of a dead rank stays as it was; its timestamp tells.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from services.runs import Run

PREFIX = "dflash_training_"


class Known(NamedTuple):
    """A file's families, as they were read when it had this stamp."""

    stamp: tuple[int, int]
    families: list[Metric]


def training_metrics(runs: Iterable[Run], known: dict[Path, Known]) -> Iterator[Metric]:
    """Every rank's families, merged by name, and which ranks' files cannot be read.

    `known` is what was read before: a file that has not changed since is not read again.
    """
    unreadable = GaugeMetricFamily(
        "dflash_training_metrics_unreadable", "Whether a rank's metrics cannot be read.", labels=["run", "rank"]
    )
    families: dict[str, Metric] = {}
    seen: set[Path] = set()
    for run in runs:
        for path in _rank_files(run):
            seen.add(path)
            rank = path.stem.removeprefix("rank-")
            try:
                of_rank = _read(path, known)
            except (OSError, ValueError) as error:
                structlog.get_logger().warning("rank_unreadable", run=run.name, rank=rank, error=str(error))
                unreadable.add_metric([run.name, rank], 1)
                continue
            unreadable.add_metric([run.name, rank], 0)
            for family in of_rank:
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    # `_created` of a file is the time of its writing, which would change at every interval.
                    if not sample.name.endswith("_created"):
                        merged.add_sample(sample.name, {**sample.labels, "run": run.name}, sample.value)
    for path in known.keys() - seen:
        del known[path]
    yield unreadable
    yield from families.values()


def _rank_files(run: Run) -> list[Path]:
    try:
        return sorted(run.rank_metrics.glob("rank-*.prom"))
    except OSError as error:  # such as of a run that is being removed
        structlog.get_logger().warning("ranks_unreadable", run=run.name, error=str(error))
        return []


def _read(path: Path, known: dict[Path, Known]) -> list[Metric]:
    """Raises ValueError when the file is no metrics text, or has other metrics than training's."""
    found = path.stat()
    stamp = (found.st_ino, found.st_mtime_ns)
    if path in known and known[path].stamp == stamp:
        return known[path].families
    families = list(text_string_to_metric_families(path.read_text(encoding="utf-8")))
    for family in families:
        if not family.name.startswith(PREFIX):
            raise ValueError(f"{path}: {family.name} is none of {PREFIX}*")
    known[path] = Known(stamp, [family for family in families if not family.name.endswith("_created")])
    return known[path].families
