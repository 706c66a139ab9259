"""A run goes on while its services are scaled and killed, and after its volumes were wiped: every prompt once."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_in_containers import CHUNKS, RUN, answered, check_totals, prepared_run
from stack_under_test import StackUnderTest, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.slow]
KILLED = ("sglang", "producer", "tokenizer", "redis")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackUnderTest]:
    with prepared_run(tmp_path_factory.mktemp("faults"), f"dflash-faults-{os.getpid()}") as stack:
        yield stack


def test_scaled_and_killed_while_it_runs_it_loses_and_doubles_nothing(stack: StackUnderTest, tmp_path: Path) -> None:
    stack.operator("submit", RUN, "--no-wait")
    stack.operate("scale", "4")
    assert len(stack.containers("producer")) == 4
    for service in KILLED:
        already = answered(stack)
        container = stack.containers(service)[0]["Name"]
        for action in ("kill", "start"):  # by hand: the engine restarts none that was killed so
            subprocess.run(["docker", action, container], check=True, capture_output=True)
        wait_until(lambda before=already: answered(stack) > before, f"progress after {service} was killed")
        if service == "producer":
            stack.operate("scale", "2")
            assert len(stack.containers("producer")) == 2
    stack.operator("submit", RUN)
    check_totals(stack, tmp_path)


def test_a_backup_brings_wiped_volumes_back_and_the_run_goes_on(stack: StackUnderTest, tmp_path: Path) -> None:
    stack.operator("submit", RUN)
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
    assert f"run {RUN}: {CHUNKS} chunks submitted; {CHUNKS} assembled" in told
    assert f"there are runs: {RUN}" in stack.operate("restore", str(saved), check=False).stderr
    stack.up("redis", "tokenizer")
    assert check_totals(stack, tmp_path / "after") == before
    stack.operator("merge", RUN)
    stack.compose("cp", f"tokenizer:/runs/{RUN}/dataset/merge.json", str(tmp_path))
    merged = json.loads((tmp_path / "merge.json").read_text())
    assert merged["added"]["samples"] + sum(merged["dropped"].values()) == sum(before.values())


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
