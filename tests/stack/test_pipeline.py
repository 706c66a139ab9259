"""The whole way in containers: the cpu images, their compose file, a real server and queue, and a small run."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.runs import Run
from services.settings import check_settings, load_settings
from services.stack.demo.containers import write_stack_files
from services.stack.report import collect_report

pytestmark = [pytest.mark.stack, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "var" / "demo"
PROJECT = "dflash-stack-test"
RUN = "small"


def compose(*arguments: str, env_file: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [
        "docker",
        "compose",
        "--project-name",
        PROJECT,
        "--env-file",
        str(env_file),
        "--file",
        "compose.cpu.yaml",
    ]
    finished = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert not check or finished.returncode == 0, f"{arguments}: {finished.stdout[-2000:]}\n{finished.stderr[-6000:]}"
    return finished


@pytest.fixture(scope="module")
def env_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`.env` and configuration of a run that is small enough for every check."""
    content = load_settings(ROOT / "config" / "demo.yaml").model_dump(mode="json")
    for source in content["sources"]:
        source.update(quota=3, held_out=1)
    content["generate"].update(chunk_size=2, max_new_tokens=24)
    content["train"].update(steps=6, checkpoint_every=3, log_every=2)
    content["evaluate"].update(max_new_tokens=12)
    folder = tmp_path_factory.mktemp("stack")
    (folder / "data").symlink_to(DEMO / "data")
    settings = check_settings(content, where="small configuration")
    write_stack_files(settings, folder, folder / "env")
    with (folder / "env").open("a") as file:
        file.write(
            "".join(f"{name}={os.environ[name]}\n" for name in ("WHEELHOUSE", "BASE_IMAGE") if name in os.environ)
        )
    return folder / "env"


@pytest.fixture(scope="module")
def stack(env_file: Path) -> Iterator[Path]:
    """The stack, built and up; its containers and volumes are removed at the end."""
    compose("build", env_file=env_file)
    try:
        up = compose(
            "up", "--detach", "--wait", "--wait-timeout", "600", "--scale", "producer=2", env_file=env_file, check=False
        )
        logs = compose("logs", "--tail", "30", env_file=env_file).stdout
        assert up.returncode == 0, f"{up.stderr[-2000:]}\n{logs[-8000:]}"
        yield env_file
    finally:
        compose("down", "--volumes", "--timeout", "20", env_file=env_file)


def operate(*arguments: str, env_file: Path) -> str:
    return compose("run", "--rm", "--no-TTY", "operator", *arguments, env_file=env_file).stdout


def test_a_run_goes_the_whole_way_and_every_number_adds_up(stack: Path, tmp_path: Path) -> None:
    operate("prepare", RUN, "--config", "/config/config.yaml", env_file=stack)
    for stage in ("submit", "merge", "train", "evaluate", "export"):
        operate(stage, RUN, env_file=stack)
    compose("cp", "tokenizer:/runs/.", str(tmp_path), env_file=stack)
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


def test_every_service_is_healthy_and_none_runs_as_root(stack: Path) -> None:
    lines = compose("ps", "--format", "json", env_file=stack).stdout.splitlines()
    services = [json.loads(line) for line in lines]
    assert {service["Service"] for service in services} == {"redis", "sglang", "producer", "tokenizer", "trainer"}
    assert sum(service["Service"] == "producer" for service in services) == 2
    for service in services:
        assert service["Health"] == "healthy", service
        assert compose("exec", "--no-TTY", service["Service"], "id", "-u", env_file=stack).stdout.strip() != "0"


def test_a_mistake_is_one_line_in_a_container_too(stack: Path) -> None:
    command = ("run", "--rm", "--no-TTY", "operator", "status", "no-such-run")
    finished = compose(*command, env_file=stack, check=False)
    assert finished.returncode == 1
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("error:")]
    assert "no run 'no-such-run'" in line
    assert "Traceback" not in finished.stderr


def test_the_gpu_stack_is_a_valid_compose_file(env_file: Path) -> None:
    command = ["docker", "compose", "--env-file", str(env_file), "--file", "compose.yaml", "--profile", "*", "config"]
    rendered = yaml.safe_load(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    servers: dict[str, Any] = {name: part for name, part in rendered["services"].items() if name.startswith("sglang-")}
    devices = [part["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for part in servers.values()]
    assert sorted(devices) == [[str(card)] for card in range(8)]
