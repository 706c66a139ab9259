"""A scrape is whole whatever the files of one run, or of the operator, hold, and however many scrape at once."""

import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.files import publish_json
from services.metrics.collector import StackCollector
from services.metrics.machine import disk_metrics
from services.metrics.operations import operations_metrics
from services.metrics.renderable import renderable
from services.metrics.training import Known, training_metrics
from services.runs import Run
from services.settings import Addresses

PART = {"samples": 1, "tokens": 2, "supervised_tokens": 1}
MERGED = {"sources": {"s": {**PART, "domain": "d"}}, "before": PART, "added": PART, "after": PART}
SUMMARY = {"completed": 1, "rejected": {}, "failed": {}, "output_tokens": 1, "attempts": 1}
ASSEMBLED = {"source": "s", **PART, "truncated": 0, "dropped": {}}
RELEASE = {"event": "done", "role": "r", "when": "2026-01-01T00:00:00+00:00", "budget": {"resident": {"imported": 5}}}


def make_run(root: Path, name: str) -> Run:
    run = Run(root / name)
    publish_json(run.record, {})
    publish_json(run.chunks, {"chunks": [{"chunk": "s-0", "source": "s", "first": 0, "count": 3}]})
    return run


def registry_of(runs: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(StackCollector(Addresses(runs=runs, redis_url="redis://127.0.0.1:1/0")))
    return registry


def scraped(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """What Prometheus reads, by name and run."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(one.name, one.labels.get("run", "")): one.value for family in families for one in family.samples}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("completions/s-0.json", {**SUMMARY, "rejected": {"empty": None}}),
        ("completions/s-0.json", {**SUMMARY, "completed": "1"}),
        ("samples/s-0.json", {"samples": 1}),
        ("samples/s-0.json", {**ASSEMBLED, "source": None}),
        ("samples/s-0.json", {**ASSEMBLED, "dropped": {"too long": None}}),
        ("samples/s-0.json", []),
        ("dataset/merge.json", {"samples": 1}),
        ("dataset/merge.json", {**MERGED, "sources": []}),
        ("dataset/merge.json", {**MERGED, "after": {**PART, "tokens": None}}),
        ("agreement.json", {"agree": None}),
        ("evaluation/after.json", {"overall": {"acceptance_length": "1"}, "by_source": None}),
        ("evaluation/after.json", {"overall": {"acceptance_length": "much"}, "by_source": {}}),
    ],
)
def test_a_file_of_another_shape_is_told_hides_no_other_run_and_is_read_again(
    tmp_path: Path, file: str, content: object
) -> None:
    damaged, _ = make_run(tmp_path, "damaged"), make_run(tmp_path, "whole")
    (damaged.root / file).parent.mkdir(exist_ok=True)
    (damaged.root / file).write_text(json.dumps(content))
    registry = registry_of(tmp_path)
    found = scraped(registry)
    assert (found["dflash_run_unreadable", "damaged"], found["dflash_run_unreadable", "whole"]) == (1, 0)
    assert ("dflash_prompts", "damaged") not in found
    assert found["dflash_prompts", "whole"] == 3
    (damaged.root / file).unlink()
    found = scraped(registry)
    assert (found["dflash_run_unreadable", "damaged"], found["dflash_prompts", "damaged"]) == (0, 3)


def test_a_folder_that_no_command_could_name_is_no_run(tmp_path: Path) -> None:
    make_run(tmp_path, "whole")
    for name in (b"\xff", b"whole (copy)", b".whole.1.tmp"):
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        (folder / "run.json").write_text("{}")
    assert generate_latest(registry_of(tmp_path)).count(b"\ndflash_run_unreadable{") == 1


def test_scrapes_at_the_same_time_count_what_is_appended_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, "r")
    registry = registry_of(tmp_path)
    run.journal("s-0").parent.mkdir()
    switched = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for batch in range(4):
            with run.journal("s-0").open("a") as file:
                for number in range(2000):
                    line = (
                        f'{{"prompt_id":"{batch}-{number}","attempts":1,"status":"completed","output_ids":[1,2,3]}}\n'
                    )
                    file.write(line)
            scrapes = [threading.Thread(target=generate_latest, args=(registry,)) for _ in range(4)]
            for scrape in scrapes:
                scrape.start()
            for scrape in scrapes:
                scrape.join()
    finally:
        sys.setswitchinterval(switched)
    found = scraped(registry)
    assert (found["dflash_journaled_prompts", "r"], found["dflash_output_tokens_total", "r"]) == (8000, 24000)


def test_a_run_that_is_removed_while_its_ranks_are_listed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, whole = Run(tmp_path / "a"), Run(tmp_path / "b")
    for run in (removed, whole):
        run.rank_metrics.mkdir(parents=True)
        (run.rank_metrics / "rank-0.prom").write_text("# TYPE dflash_training_loss gauge\ndflash_training_loss 1.5\n")
    known: dict[Path, Known] = {}
    list(training_metrics([removed, whole], known))
    scan = os.scandir

    def remove_first(path: object) -> object:
        if path == removed.rank_metrics:
            shutil.rmtree(removed.root)
        return scan(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", remove_first)
    names = [
        (sample.name, sample.labels["run"])
        for family in training_metrics([removed, whole], known)
        for sample in family.samples
    ]
    assert names == [("dflash_training_metrics_unreadable", "b"), ("dflash_training_loss", "b")]
    # What is gone is not remembered.
    assert [path.parents[2] for path in known] == [whole.root]


@pytest.mark.parametrize("versions", ["cuda = 1", "[trainer]\ncu128 = 1", "[trainer]\ncu128 = [1]", "[trainer"])
def test_versions_of_another_shape_are_told(tmp_path: Path, versions: str) -> None:
    path = tmp_path / "versions.toml"
    path.write_text(versions)
    assert _unreadable(path, tmp_path / "releases.jsonl") == {"versions.toml": 1}


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {**RELEASE, "to": None},
        {**RELEASE, "to": {"reference": None}},
        {**RELEASE, "to": {"reference": "i"}, "budget": 5},
        {**RELEASE, "to": {"reference": "i"}, "budget": {"resident": {"imported": None}}},
    ],
)
def test_releases_of_another_shape_are_told(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "releases.jsonl"
    path.write_text(json.dumps(entry) + "\n")
    assert _unreadable(tmp_path / "versions.toml", path) == {"releases.jsonl": 1}


def test_a_place_that_cannot_be_asked_leaves_the_scrape_whole(tmp_path: Path) -> None:
    beyond = tmp_path / ("x" * 300)
    assert _unreadable(beyond, tmp_path / "file") == {beyond.name: 1}
    assert [sample for family in disk_metrics(beyond) for sample in family.samples] == []
    assert b"dflash_redis_up" in generate_latest(registry_of(beyond))


def _unreadable(versions: Path, releases: Path) -> dict[str, float]:
    families = renderable(operations_metrics(versions, releases))
    return {sample.labels["file"]: sample.value for family in families for sample in family.samples}
