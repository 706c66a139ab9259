"""Metrics that are read from files: ranks', merges', the operator's, the kernel's."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile
from prometheus_client.metrics_core import Metric

from services.files import publish_json
from services.metrics.dataset import DatasetFamilies, read_published
from services.metrics.gpu import driver_version, gpu_metrics
from services.metrics.machine import read_memory
from services.metrics.operations import operations_metrics
from services.metrics.training import Known, training_metrics
from services.metrics.worker import torch_cuda
from services.runs import Run

ROOT = Path(__file__).parents[3]


def values(metrics: Iterable[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in metrics for s in family.samples}


def write_rank(run: Run, rank: str, steps: float, loss: float) -> None:
    registry = CollectorRegistry()
    labels = {"rank": rank, "role": "colocated"}
    Counter("dflash_training_steps", "Steps.", list(labels), registry=registry).labels(**labels).inc(steps)
    Gauge("dflash_training_loss", "Loss.", list(labels), registry=registry).labels(**labels).set(loss)
    run.rank_metrics.mkdir(parents=True, exist_ok=True)
    write_to_textfile(str(run.rank_metrics / f"rank-{rank}.prom"), registry)


def test_every_rank_of_every_run_is_served_with_its_run(tmp_path: Path) -> None:
    first, second = Run(tmp_path / "a"), Run(tmp_path / "b")
    write_rank(first, "0", 10, 2.5)
    write_rank(first, "1", 10, 2.25)
    write_rank(second, "0", 3, float("nan"))
    families = list(training_metrics([first, second], {}))
    assert len({family.name for family in families}) == len(families)
    found = values(families)

    def of(name: str, run: str, rank: str) -> float:
        return found[name, (("rank", rank), ("role", "colocated"), ("run", run))]

    assert [of("dflash_training_steps_total", "a", rank) for rank in "01"] == [10, 10]
    assert of("dflash_training_loss", "a", "1") == 2.25
    assert of("dflash_training_steps_total", "b", "0") == 3
    assert not any(name.endswith("_created") for name, _ in found)


@pytest.mark.parametrize("content", ["dflash_training_loss{rank=", "node_load1 3\n", "\x00\xff"])
def test_a_rank_whose_file_is_no_metrics_of_training_is_told_and_hides_no_other(tmp_path: Path, content: str) -> None:
    run = Run(tmp_path / "a")
    write_rank(run, "0", 10, 2.5)
    (run.rank_metrics / "rank-1.prom").write_bytes(content.encode("latin-1"))
    found = values(training_metrics([run], {}))
    assert found["dflash_training_metrics_unreadable", (("rank", "1"), ("run", "a"))] == 1
    assert found["dflash_training_metrics_unreadable", (("rank", "0"), ("run", "a"))] == 0
    assert found["dflash_training_steps_total", (("rank", "0"), ("role", "colocated"), ("run", "a"))] == 10


def test_a_rank_that_writes_again_is_read_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    known: dict[Path, Known] = {}
    labels = (("rank", "0"), ("role", "colocated"), ("run", "a"))
    for step in (1, 2, 3):
        write_rank(run, "0", step, 1.0)
        for _ in range(2):
            assert values(training_metrics([run], known))["dflash_training_steps_total", labels] == step


def test_a_merge_and_the_evaluations_are_told_by_source(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    part = {"samples": 3, "tokens": 30, "supervised_tokens": 10}
    parts = {"before": {**part, "lengths": {"16": 3}}, "added": part, "after": part}
    publish_json(run.merged, {**parts, "sources": {"math": {**part, "domain": "math"}}})
    publish_json(run.agreement, {"agree": 97.5})
    for name, length in (("before", 1.0), ("after", 1.5)):
        report = {"overall": {"acceptance_length": length}, "by_source": {"math": {"acceptance_length": length + 1}}}
        publish_json(run.evaluation(name), report)
    families = DatasetFamilies()
    families.add(run, [], read_published(run, {}))
    found = values(families.all())
    assert found["dflash_dataset_tokens", (("domain", "math"), ("run", "a"), ("source", "math"))] == 30
    assert found["dflash_merge_supervised_tokens", (("part", "added"), ("run", "a"))] == 10
    assert found["dflash_dataset_lengths", (("part", "before"), ("run", "a"), ("up_to", "16"))] == 3
    assert found["dflash_agreement_ratio", (("run", "a"),)] == 0.975
    labels = (("evaluation", "after"), ("run", "a"))
    assert found["dflash_evaluation_acceptance_length", (*labels, ("source", "all"))] == 1.5
    assert found["dflash_evaluation_acceptance_length", (*labels, ("source", "math"))] == 2.5


def test_an_evaluation_in_which_nothing_was_verified_leaves_the_scrape_whole(tmp_path: Path) -> None:
    run, nothing = Run(tmp_path / "a"), {"acceptance_length": None}
    report = {"overall": nothing, "by_source": {"math": nothing}}
    publish_json(run.evaluation("after"), report)
    families = DatasetFamilies()
    families.add(run, [], read_published(run, {}))
    assert values(families.all()) == {}


def entry(event: str, reference: str, budget: dict[str, dict[str, int]] | None) -> str:
    to = {"image": "sha256:00", "reference": reference, "variant": None, "contents": {}}
    when = "2026-01-01T00:00:00+00:00"
    return json.dumps({"when": when, "event": event, "action": "swap", "role": "trainer", "to": to, "budget": budget})


def test_the_operators_files_are_told(tmp_path: Path) -> None:
    path = tmp_path / "releases.jsonl"
    measured = {"resident": {"imported": 5}, "card 0": {"context": 6, "kernels": 7}}
    lines = [
        entry("measured", "trainer:v2", measured),
        entry("begun", "trainer:v3", None),
        entry("undone", "trainer:v3", None),
        entry("done", "trainer:v2", measured),
    ]
    path.write_text("\n".join([*lines, '{"when": "202']))
    found = values(operations_metrics(ROOT / "images" / "versions.toml", path))
    assert found["dflash_memory_budget_bytes", (("device", "0"), ("service", "trainer"), ("stage", "kernels"))] == 7
    assert found["dflash_memory_budget_bytes", (("device", "host"), ("service", "trainer"), ("stage", "imported"))] == 5
    changed = {labels: at for (name, labels), at in found.items() if name == "dflash_release_timestamp_seconds"}
    assert changed == {(("reference", "trainer:v2"), ("service", "trainer")): 1767225600}
    assert found["dflash_required_version_info", (("cuda", "12.8"), ("image", "trainer"), ("torch", "2.10.0"))] == 1


def test_without_the_operators_files_there_is_nothing_and_a_broken_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "releases.jsonl"
    assert values(operations_metrics(tmp_path / "versions.toml", path)) == {}
    path.write_text('{"event": "done"}\n')
    found = values(operations_metrics(tmp_path / "versions.toml", path))
    assert found == {("dflash_operations_unreadable", (("file", "releases.jsonl"),)): 1}


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_memory_is_what_the_kernel_cannot_take_back(tmp_path: Path, version: int) -> None:
    folder = tmp_path / "memory" if version == 1 else tmp_path
    usage, peak, limit, inactive = (
        ("memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.current", "memory.peak", "memory.max", "inactive_file")
    )
    folder.mkdir(exist_ok=True)
    (folder / usage).write_text("1000\n")
    (folder / peak).write_text("1500\n")
    (folder / limit).write_text("2000\n")
    (folder / "memory.stat").write_text(f"anon 5\n{inactive} 300\n")
    assert read_memory(tmp_path) == {"working_set": 700, "peak": 1500, "limit": 2000}
    (folder / limit).write_text("9223372036854771712\n" if version == 1 else "max\n")
    assert read_memory(tmp_path)["limit"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_where_the_kernel_counts_no_memory_there_is_none(tmp_path: Path) -> None:
    assert read_memory(tmp_path) == {}


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90  Tue", "550.90"),
        ("something else", "none"),
    ],
)
def test_the_driver_is_told(tmp_path: Path, line: str, version: str) -> None:
    (tmp_path / "version").write_text(line + "\n")
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "absent") == "none"


def test_an_environment_without_torch_says_so() -> None:
    assert torch_cuda() == "none"


class FakeNvmlError(Exception):
    """What a card that does not answer raises."""


class FakeNotSupportedError(FakeNvmlError):
    """What a card raises that has no such value."""


def _fake_nvml(broken: int, **others: Any) -> Any:
    """NVML as pynvml has it, of two cards, one of which does not answer, with other answers to some calls."""

    def name(card: int) -> str:
        if card == broken:
            raise FakeNvmlError("GPU is lost")
        return "RTX PRO 6000"

    answers = {
        "NVMLError": FakeNvmlError,
        "NVMLError_NotSupported": FakeNotSupportedError,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": name,
        "nvmlDeviceGetMemoryInfo": lambda _card: SimpleNamespace(used=6 * 2**30, total=96 * 2**30),
        "nvmlDeviceGetUtilizationRates": lambda _card: SimpleNamespace(gpu=97),
        "nvmlDeviceGetPowerUsage": lambda _card: 450_000,
        "nvmlDeviceGetTemperature": lambda _card, _sensor: 71,
    }
    return SimpleNamespace(**{**answers, **others})


def _raise(error: Exception) -> Any:
    raise error


CARD = (("gpu", "0"), ("model", "RTX PRO 6000"))
OF_CARD = {
    ("dflash_gpu_memory_used_bytes", CARD): 6 * 2**30,
    ("dflash_gpu_memory_size_bytes", CARD): 96 * 2**30,
    ("dflash_gpu_busy_ratio", CARD): 0.97,
    ("dflash_gpu_power_watts", CARD): 450,
    ("dflash_gpu_temperature_celsius", CARD): 71,
}


def test_cards_are_told_in_base_units_and_one_that_does_not_answer_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _fake_nvml(broken=1))
    assert values(gpu_metrics()) == OF_CARD


@pytest.mark.parametrize("error", [FakeNotSupportedError("Not Supported"), FakeNvmlError("Unknown Error")])
def test_a_value_that_a_card_does_not_have_hides_no_other(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    # As of a card that is cut up by MIG, or of a virtual one.
    lacks = {
        "nvmlDeviceGetUtilizationRates": lambda _card: _raise(error),
        "nvmlDeviceGetPowerUsage": lambda _: _raise(error),
    }
    monkeypatch.setitem(sys.modules, "pynvml", _fake_nvml(broken=1, **lacks))
    absent = ("dflash_gpu_busy_ratio", "dflash_gpu_power_watts")
    assert values(gpu_metrics()) == {key: value for key, value in OF_CARD.items() if key[0] not in absent}


def test_a_driver_that_fails_in_between_leaves_the_scrape_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    error = FakeNvmlError("Driver/library version mismatch")
    for fails in ({"nvmlDeviceGetCount": lambda: _raise(error)}, {"nvmlInit": lambda: _raise(error)}):
        monkeypatch.setitem(sys.modules, "pynvml", _fake_nvml(broken=1, nvmlShutdown=lambda: _raise(error), **fails))
        assert values(gpu_metrics()) == {}


def test_without_a_driver_there_are_no_cards() -> None:
    assert values(gpu_metrics()) == {}
