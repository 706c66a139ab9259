"""The doctor names what is wrong on a host, with the remedy beside it."""

import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.stack.operate.doctor import (
    Check,
    check_cards,
    check_disk,
    check_engine,
    check_files,
    check_images,
    check_memory,
    check_ports,
    check_secrets,
    check_toolkit,
)
from services.stack.operate.project import Project
from services.stack.operate.secret_folder import make_secrets

ROOT = Path(__file__).parents[4]
Cards = Callable[[list[str], list[str]], None]
CARD = "{index}, GPU-{index}, RTX PRO 6000, {driver}, {used}, 97887"


def gpu(card: int) -> dict[str, Any]:
    device = {"driver": "nvidia", "device_ids": [str(card)], "capabilities": ["gpu"]}
    reserved = {"resources": {"reservations": {"devices": [device]}}}
    return {"image": "dflash-stack/sglang:cu130-dev", "profiles": ["generate"], "deploy": reserved}


def wrong(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks if check.state == "wrong"}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A checkout whose .env is right, for two cards."""
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).touch()
    shutil.copy(ROOT / "config" / "demo.yaml", tmp_path / "run.yaml")
    (tmp_path / ".env").write_text("MODEL_DIR=$HERE/model\nSERVED_NAME=SmolLM2-135M-Instruct\n")
    make_secrets(tmp_path / "secrets")
    sources = {"/model": "model", "/data": "data", "/config/config.yaml": "run.yaml"}
    volumes = [
        {"type": "bind", "source": str(tmp_path / name), "target": target} for target, name in sources.items()
    ] + [{"type": "volume", "source": "runs", "target": "/runs"}]
    secrets = {"redis_password": tmp_path / "secrets" / "redis_password"}
    services = {"sglang-0": gpu(0), "sglang-1": gpu(1), "tokenizer": {"image": "x", "volumes": volumes}}
    return Project(tmp_path, tmp_path / ".env", "dflash-no-such", services, secrets)


def test_a_host_that_is_well_has_nothing_wrong(project: Project) -> None:
    checks = [*check_files(project), *check_secrets(project)]
    assert [check.state for check in checks] == ["ok"] * len(checks)


def test_too_old_a_driver_and_too_few_cards_are_told(project: Project, cards: Cards, docker: Path) -> None:
    cards([CARD.format(index=0, driver="570.86.15", used=1)], [])
    found = wrong(check_cards(project))
    assert found["driver"].detail == "570.86.15, and the images' CUDA needs 580"
    assert found["GPUs"].detail == "1 cards, and 1 is configured too"
    assert found["GPUs"].remedy == "dflash-stack render --gpus 1 --output compose.yaml"


def test_a_card_that_somebody_else_holds_is_told(project: Project, cards: Cards, docker: Path) -> None:
    rows = [CARD.format(index=card, driver="580.95.05", used=9000) for card in range(2)]
    cards(rows, [f"GPU-1, {os.getpid()}, 8990"])
    found = wrong(check_cards(project))["GPU memory"]
    assert found.detail.endswith("no container, holds 8,990 MiB")
    assert found.remedy == f"end it: kill {os.getpid()}"


def test_a_machine_without_a_card_is_told(project: Project, cards: Cards) -> None:
    cards([], [])
    assert "finds no card" in wrong(check_cards(project))["GPUs"].detail


def test_a_missing_secret_and_a_placeholder_are_named(project: Project) -> None:
    password = project.folder / "secrets" / "redis_password"
    password.chmod(0o600)
    password.write_text("changeme-please")
    password.with_name("redis_exporter.json").unlink()
    make_secrets(password.parent)
    assert "it is a placeholder" in wrong(check_secrets(project))["secrets"].detail
    password.unlink()
    found = wrong(check_secrets(project))["secrets"]
    assert found.detail == f"{password.parent} has no redis_password"
    assert found.remedy == "dflash-stack secrets"
    shutil.rmtree(project.folder / "secrets")
    assert wrong(check_secrets(project))["secrets"].remedy == "dflash-stack secrets"


def test_secrets_that_others_can_read_are_told(project: Project) -> None:
    (project.folder / "secrets").chmod(0o755)
    assert wrong(check_secrets(project))["secrets"].remedy.startswith("chmod 700")


def test_what_env_names_has_to_be_there_and_agree(project: Project) -> None:
    (project.folder / "model" / "tokenizer.json").unlink()
    (project.folder / "data").rmdir()
    text = project.env_file.read_text()
    project.env_file.write_text(text.replace("SmolLM2-135M-Instruct", "another"))
    found = wrong(check_files(project))
    assert "has no tokenizer.json" in found["model"].detail
    assert "is no folder" in found["data"].detail
    assert "SERVED_NAME is 'another'" in found["config"].detail


def test_a_port_that_is_taken_is_told_unless_the_service_itself_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        services = {"grafana": {"ports": [{"host_ip": "127.0.0.1", "published": str(port)}]}}
        found = wrong(check_ports(services, set()))
        assert found["port"].detail == f"127.0.0.1:{port}, for grafana: in use"
        assert "set another port in .env" in found["port"].remedy
        assert list(check_ports(services, {"grafana"})) == []
    assert [check.state for check in check_ports(services, set())] == ["ok"]


def test_a_range_of_ports_is_in_use_when_each_of_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def state(published: str) -> str:
            services = {"grafana": {"ports": [{"host_ip": "127.0.0.1", "published": published}]}}
            (check,) = check_ports(services, set())
            return check.state

        assert state(f"{port}-{port}") == "wrong"
        assert state(f"{port}-{port + 20}") == "ok"
    assert list(check_ports({"grafana": {"ports": [{"target": 3000}]}}, set())) == []


def test_a_folder_that_this_user_may_not_read_is_a_line_and_the_rest_is_looked_at(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Path, _pattern: str) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "glob", forbidden)
    checks = {check.name: check for check in check_files(project)}
    assert checks["model"].detail.endswith("model: Permission denied")
    assert "this user the right" in checks["model"].remedy
    assert checks["data"].state == "ok"


def test_a_limit_over_the_hosts_memory_is_warned_of() -> None:
    services = {"trainer": {"mem_limit": str(256 * 2**30), "shm_size": str(2 * 2**30)}}
    memory, shared = check_memory(services, 64 * 2**30)
    assert (memory.state, shared.state) == ("warning", "ok")
    assert "trainer may use 256" in memory.detail


def test_an_engine_whose_disk_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def room(free: int) -> Callable[[Path], SimpleNamespace]:
        return lambda _: SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", room(3 * 10**9))
    found = check_disk(tmp_path)
    assert (found.state, found.detail) == ("wrong", f"3 GB free in {tmp_path}")
    assert found.remedy.startswith("docker image prune")
    monkeypatch.setattr(shutil, "disk_usage", room(20 * 10**9))
    assert check_disk(tmp_path).state == "warning"
    monkeypatch.setattr(shutil, "disk_usage", room(500 * 10**9))
    assert check_disk(tmp_path).state == "ok"


def test_an_engine_that_knows_no_start_interval_is_too_old(docker: Path) -> None:
    script = docker.with_name("bin") / "docker"
    script.write_text('#!/bin/sh\ncase "$1" in version) echo 24.0.9;; compose) echo v2.24.0-desktop.1;; esac\n')
    engine, compose = check_engine()
    assert (engine.state, engine.remedy) == ("wrong", "install 25.0 or later")
    assert (compose.state, compose.detail) == ("ok", "2.24.0-desktop.1")


def test_a_toolkit_is_known_by_its_runtime_or_by_its_hook(docker: Path) -> None:
    script = docker.with_name("bin") / "docker"
    script.write_text("#!/bin/sh\necho '{\"runc\": {}}'\n")
    assert check_toolkit().state == "wrong"
    hook = docker.with_name("bin") / "nvidia-container-runtime-hook"
    hook.touch(mode=0o755)
    assert check_toolkit().state == "ok"
    hook.unlink()
    script.write_text('#!/bin/sh\necho \'{"nvidia": {}, "runc": {}}\'\n')
    assert check_toolkit().state == "ok"


def test_cards_may_be_configured_by_their_uuid(project: Project, cards: Cards, docker: Path) -> None:
    for number, name in enumerate(("GPU-0", "GPU-9")):
        device = project.services[f"sglang-{number}"]["deploy"]["resources"]["reservations"]["devices"][0]
        device["device_ids"] = [name]
    cards([CARD.format(index=0, driver="580.95.05", used=1)], [])
    assert wrong(check_cards(project))["GPUs"].detail == "1 cards, and GPU-9 is configured too"


def test_files_that_a_container_could_not_reach_are_told(project: Project) -> None:
    model, blob = project.folder / "model", project.folder / "blob"
    (model / "model.safetensors").rename(blob)
    (model / "model.safetensors").symlink_to(blob)
    found = wrong(check_files(project))["model"]
    assert found.detail == f"{model}/model.safetensors is a link out of the folder, and ends nowhere in a container"
    assert found.remedy == f"cp --recursive --dereference {model} ELSEWHERE, and set MODEL_DIR to that"
    blob.rename(model / "model.safetensors")
    model.chmod(0o700)
    (project.folder / "data").chmod(0o700)
    (project.folder / "run.yaml").chmod(0o600)
    found_all = wrong(check_files(project))
    assert found_all["model"].remedy == f"chmod -R a+rX {model}"
    assert found_all["data"].remedy == f"chmod -R a+rX {project.folder / 'data'}"
    assert found_all["config"].remedy == f"chmod a+r {project.folder / 'run.yaml'}"


def test_a_password_that_was_changed_in_one_of_its_two_files_is_told(project: Project) -> None:
    secrets = project.folder / "secrets"
    (secrets / "redis_password").chmod(0o600)
    (secrets / "redis_password").write_text("f00d" * 8)
    (secrets / "redis_password").chmod(0o444)
    found = wrong(check_secrets(project))["secrets"]
    assert found.detail == f"{secrets}/redis_exporter.json has another password than redis_password"
    assert found.remedy == f"rm -f {secrets}/redis_exporter.json; dflash-stack secrets"


def test_a_token_that_the_containers_cannot_read_is_told(project: Project) -> None:
    (project.folder / "secrets" / "hf_token").chmod(0o400)
    assert wrong(check_secrets(project))["secrets"].remedy == f"chmod 444 {project.folder / 'secrets' / 'hf_token'}"


def test_an_image_of_others_that_is_not_here_is_fetched_and_one_of_ours_has_to_be_built(docker: Path) -> None:
    script = docker.with_name("bin") / "docker"
    script.write_text("#!/bin/sh\necho 'Error: No such image' >&2; exit 1\n")
    services = {"redis": {"image": "redis:8"}, "producer": {"image": "dflash-stack/producer:cpu-dev"}}
    ours, others = check_images(services)
    assert (ours.state, ours.remedy) == ("wrong", "make build")
    assert (others.state, others.remedy) == (
        "warning",
        "it is pulled when it is needed; without a registry: docker load",
    )
