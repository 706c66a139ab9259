"""The whole way in containers: the cpu images, their compose file, a real server and queue, and a small run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack_under_test import ROOT, StackUnderTest, make_stack

from services.runs import Run
from services.settings import check_settings, load_settings
from services.stack.operate.project import open_project
from services.stack.operate.smoke import smoke_before_start, smoke_serving
from services.stack.report import collect_report

pytestmark = [pytest.mark.stack, pytest.mark.slow]
RUN = "small"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackUnderTest]:
    """The whole stack, built and up, for a run that is small enough for every check."""
    content = load_settings(ROOT / "config" / "demo.yaml").model_dump(mode="json")
    for source in content["sources"]:
        source.update(quota=3, held_out=1)
    content["generate"].update(chunk_size=2, max_new_tokens=24)
    content["train"].update(steps=6, checkpoint_every=3, log_every=2)
    content["evaluate"].update(max_new_tokens=12)
    folder = tmp_path_factory.mktemp("stack")
    (folder / "data").symlink_to(ROOT / "var" / "demo" / "data")
    settings = check_settings(content, where="small configuration")
    stack = make_stack(folder, settings, "dflash-stack-test", {"PRODUCERS": "2"})
    stack.compose("build")
    try:
        stack.up("redis", "sglang", "producer", "tokenizer", "trainer")
        yield stack
    finally:
        stack.down()


def test_a_run_goes_the_whole_way_and_every_number_adds_up(stack: StackUnderTest, tmp_path: Path) -> None:
    stack.operator("prepare", RUN, "--config", "/config/config.yaml")
    for stage in ("submit", "merge", "train", "evaluate", "export"):
        stack.operator(stage, RUN)
    stack.compose("cp", "tokenizer:/runs/.", str(tmp_path))
    report = collect_report(Run(tmp_path / RUN))

    assert sum(counts["prompts"] for counts in report["generated"].values()) == 12
    finished = sum(
        counts["completed"] + sum(counts["rejected"].values()) + sum(counts["failed"].values())
        for counts in report["generated"].values()
    )
    assert finished == 12
    assert all(not counts["failed"] for counts in report["generated"].values())
    merged = report["merged"]
    assert merged["after"]["samples"] == merged["before"]["samples"] + merged["added"]["samples"]
    assert report["training"]["steps"] == 6
    for which in ("before", "after"):
        assert report["acceptance"][which]["overall"]["prompts"] == 4
        assert report["acceptance"][which]["lossless"]["mismatches"] == []
    exported = json.loads((tmp_path / RUN / "export" / "config.json").read_text())
    assert exported["architectures"] == ["DFlashDraftModel"]


def test_every_service_is_healthy_and_none_runs_as_root(stack: StackUnderTest) -> None:
    lines = stack.compose("ps", "--format", "json").stdout.splitlines()
    services = [json.loads(line) for line in lines]
    assert {service["Service"] for service in services} == {"redis", "sglang", "producer", "tokenizer", "trainer"}
    assert sum(service["Service"] == "producer" for service in services) == 2
    for service in services:
        assert service["Health"] == "healthy", service
        assert stack.compose("exec", "--no-TTY", service["Service"], "id", "-u").stdout.strip() != "0"


def test_a_mistake_is_one_line_in_a_container_too(stack: StackUnderTest) -> None:
    finished = stack.compose("run", "--rm", "--no-TTY", "operator", "status", "no-such-run", check=False)
    assert finished.returncode == 1
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("error:")]
    assert "no run 'no-such-run'" in line
    assert "Traceback" not in finished.stderr


def test_the_server_of_the_stack_generates_when_its_smoke_check_asks(stack: StackUnderTest) -> None:
    project = open_project(ROOT, stack.env_file)
    assert smoke_serving(project, "sglang") == "the server generated 8 tokens"
    assert "tokenizes with the target's tokenizer" in smoke_before_start(project, "tokenizer")
    assert smoke_before_start(project, "producer") == "the producer's jobs load"
