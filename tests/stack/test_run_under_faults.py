"""A run goes on while its services are scaled and killed, and after its volumes were wiped: every prompt once."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack_under_test import ROOT, StackUnderTest, make_stack, wait_until

from services.runs import Run
from services.settings import check_settings, load_settings
from services.stack.report import collect_report

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.long]
RUN = "r"
QUOTA = 60
SOURCES = 4
KILLED = ("sglang", "producer", "tokenizer", "redis")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackUnderTest]:
    """The stack that generates, with a server that answers slowly enough to be interrupted, and a prepared run."""
    folder = tmp_path_factory.mktemp("faults")
    content = load_settings(ROOT / "config" / "demo.yaml").model_dump(mode="json")
    for source in content["sources"]:
        source.update(quota=QUOTA, held_out=1)
    content["generate"].update(chunk_size=5, max_new_tokens=64, max_repetition=1.0, concurrency=8, attempts=20)
    content["generate"].update(lost_connections=20, tool_calls="keep")
    content["train"].update(steps=2, checkpoint_every=2, log_every=1)
    settings = check_settings(content, where="faults")
    (folder / "data").symlink_to(ROOT / "var" / "demo" / "data")
    files = {"COMPOSE_FILE": "compose.cpu.yaml:tests/stack/fake_server.yaml"}
    stack = make_stack(folder, settings, f"dflash-faults-{os.getpid()}", files)
    stack.compose("build", "producer", "tokenizer")
    try:
        stack.up("redis", "sglang", "producer", "tokenizer")
        stack.operator("prepare", RUN, "--config", "/config/config.yaml")
        yield stack
    finally:
        stack.down()


def finished(stack: StackUnderTest) -> int:
    """Chunks with a summary, as the files have it."""
    listed = stack.compose("exec", "--no-TTY", "tokenizer", "sh", "-c", f"ls /runs/{RUN}/completions/*.json | wc -l")
    return int(listed.stdout)


def check_totals(stack: StackUnderTest, folder: Path) -> dict[str, dict[str, int]]:
    """Every prompt is one sample, rejection or failure; returns the counts of the run's report."""
    stack.compose("cp", "tokenizer:/runs/.", str(folder))
    report = collect_report(Run(folder / RUN))
    generated = report["generated"]
    assert {name: counts["prompts"] for name, counts in generated.items()} == dict.fromkeys(generated, QUOTA)
    assert len(generated) == SOURCES
    ended = sum(
        counts["completed"] + sum(counts["rejected"].values()) + sum(counts["failed"].values())
        for counts in generated.values()
    )
    assert ended == SOURCES * QUOTA
    assert not any(counts["failed"] for counts in generated.values())
    return {name: {"completed": counts["completed"]} for name, counts in generated.items()}


def test_scaled_and_killed_while_it_runs_it_loses_and_doubles_nothing(stack: StackUnderTest, tmp_path: Path) -> None:
    stack.operator("submit", RUN, "--no-wait")
    stack.operate("scale", "4")
    assert len(stack.containers("producer")) == 4
    for service in KILLED:
        already = finished(stack)
        container = stack.containers(service)[0]["Name"]
        subprocess.run(["docker", "kill", container], check=True, capture_output=True)
        stack.up(service)  # a container that was killed by hand is not restarted by the engine
        wait_until(lambda before=already: finished(stack) > before, f"progress after {service} was killed")
        if service == "producer":
            stack.operate("scale", "2")
            assert len(stack.containers("producer")) == 2
    stack.operator("submit", RUN)
    check_totals(stack, tmp_path)


def test_a_backup_brings_wiped_volumes_back_and_the_run_goes_on(stack: StackUnderTest, tmp_path: Path) -> None:
    before = check_totals(stack, tmp_path / "before")
    stack.operate("backup", "--to", str(tmp_path / "backups"))
    (saved,) = (tmp_path / "backups").iterdir()
    refused = stack.operate("restore", str(saved), check=False)
    assert refused.returncode == 1
    assert "is up; take the stack down first: make down" in refused.stderr
    stack.down()
    archive = saved / "runs.tar"
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-1])
    assert "sha256 differs" in stack.operate("restore", str(saved), check=False).stderr
    archive.write_bytes(whole)
    told = stack.operate("restore", str(saved)).stdout
    assert f"run {RUN}: {SOURCES * QUOTA // 5} chunks submitted; {SOURCES * QUOTA // 5} assembled" in told
    assert f"there are runs: {RUN}" in stack.operate("restore", str(saved), check=False).stderr
    stack.up("redis", "tokenizer")
    assert check_totals(stack, tmp_path / "after") == before
    stack.operator("merge", RUN)
    stack.compose("cp", f"tokenizer:/runs/{RUN}/dataset/merge.json", str(tmp_path))
    merged = json.loads((tmp_path / "merge.json").read_text())
    assert merged["added"]["samples"] == sum(counts["completed"] for counts in before.values())


def test_no_secret_is_in_a_log_a_process_or_an_images_history(stack: StackUnderTest) -> None:
    folder = Path(stack.env_file).with_name("secrets")
    secret = (folder / "redis_password").read_text()
    assert secret not in stack.compose("logs", "--no-color").stdout
    assert secret not in stack.compose("config").stdout
    for service in ("redis", "tokenizer"):
        name = stack.containers(service)[0]["Name"]
        for command in (["top", name], ["inspect", name]):
            shown = subprocess.run(["docker", *command], capture_output=True, text=True, check=True).stdout
            assert secret not in shown, command
    images = set(stack.compose("config", "--images").stdout.split())
    for image in sorted(name for name in images if name.startswith("dflash-stack/")):
        if subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode == 0:
            history = ["docker", "history", "--no-trunc", "--format", "{{.CreatedBy}}", image]
            shown = subprocess.run(history, capture_output=True, text=True, check=True).stdout
            assert not any(word in shown.lower() for word in ("password=", "token=", "@pypi", secret)), image
