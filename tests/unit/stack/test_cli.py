"""A user's mistake is one line on standard error, exit status 1, and nothing written."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from services.settings import load_settings
from services.stack import cli

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "config" / "demo.yaml"


def dflash_stack(
    *arguments: str, runs: Path, redis_url: str = "redis://127.0.0.1:1/0"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DFLASH_RUNS": str(runs), "DFLASH_REDIS_URL": redis_url}
    return subprocess.run(
        [sys.executable, "-m", "services.stack", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=60,
    )


def error_of(finished: subprocess.CompletedProcess[str]) -> str:
    assert finished.returncode == 1, finished
    assert finished.stderr.startswith("error: ")
    assert finished.stderr.count("\n") == 1, finished.stderr
    return finished.stderr


@pytest.mark.parametrize(
    "command",
    [
        "prepare",
        "submit",
        "status",
        "merge",
        "train",
        "evaluate",
        "export",
        "report",
        "demo",
        "worker",
        "inspect",
        "phase",
        "swap",
        "budget",
    ],
)
def test_every_stage_explains_itself(command: str, tmp_path: Path) -> None:
    finished = dflash_stack(command, "--help", runs=tmp_path)
    assert finished.returncode == 0
    assert "Usage" in finished.stdout


def test_what_runs_every_few_seconds_imports_nothing_heavy() -> None:
    status = "import services.stack.cli, services.stack.status, services.queues, services.heartbeats"
    loaded = f"{status}, sys; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    assert not {"pyarrow", "numpy", "matplotlib", "datasets", "torch"} & set(modules.split())


def test_the_demos_configuration_is_valid() -> None:
    settings = load_settings(DEMO)
    assert {source.domain for source in settings.sources} == {"code", "general", "tools", "math"}


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "config").glob("*.yaml")))
def test_every_shipped_configuration_is_valid(name: str) -> None:
    load_settings(ROOT / "config" / name)


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(DEMO.read_text().replace("chunk_size:", "chunksize:"))
    error = error_of(dflash_stack("prepare", "run", "--config", str(config), runs=tmp_path / "runs"))
    assert "there is no key 'generate.chunksize'" in error
    assert str(config) in error
    assert not (tmp_path / "runs").exists()


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    error = error_of(dflash_stack("prepare", "run", "--config", str(tmp_path / "no.yaml"), runs=tmp_path))
    assert "no.yaml" in error


def test_a_redis_that_does_not_answer_is_named(tmp_path: Path) -> None:
    error = error_of(dflash_stack("prepare", "run", "--config", str(DEMO), runs=tmp_path / "runs"))
    assert "Redis at 127.0.0.1:1/0" in error
    assert "DFLASH_REDIS_URL" in error
    assert not (tmp_path / "runs").exists()


def test_an_unknown_run_is_named_with_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "run.json").write_text("{}")
    error = error_of(dflash_stack("status", "other", runs=tmp_path))
    assert "no run 'other'" in error
    assert "there are: known" in error


def test_an_unknown_queue_is_named_with_those_there_are(tmp_path: Path) -> None:
    error = error_of(dflash_stack("worker", "generation", runs=tmp_path))
    assert "there is no queue 'generation'" in error
    assert "prepare, generate, assemble, merge, train" in error


def test_a_worker_that_never_started_is_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_HEARTBEAT", str(tmp_path / "heartbeat"))
    assert "no heartbeat" in error_of(dflash_stack("healthcheck", "generate", runs=tmp_path))
    (tmp_path / "heartbeat-generate").touch()
    assert dflash_stack("healthcheck", "generate", runs=tmp_path).returncode == 0
    os.utime(tmp_path / "heartbeat-generate", (0, 0))
    assert "it hangs" in error_of(dflash_stack("healthcheck", "generate", runs=tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"settings": 3}'])
def test_a_damaged_run_record_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "run.json").write_text(content)
    error = error_of(dflash_stack("report", "known", runs=tmp_path))
    assert "known/run.json" in error


def test_a_configuration_that_is_no_text_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_bytes(b"\xd0\xff")
    error = error_of(dflash_stack("prepare", "run", "--config", str(config), runs=tmp_path))
    assert f"configuration {config} is not YAML" in error


@pytest.mark.parametrize(
    "url",
    [
        "valkey://there",
        "redis://there:port",
        "redis://[::1",
        "redis://there..again:6379",
        "redis://127.0.0.1:1/0?patience=1",
    ],
)
def test_an_impossible_redis_address_is_named(tmp_path: Path, url: str) -> None:
    error = error_of(dflash_stack("prepare", "run", "--config", str(DEMO), runs=tmp_path, redis_url=url))
    assert "DFLASH_REDIS_URL is no address of Redis; write it as redis://HOST:PORT/0" in error


def test_a_password_in_the_address_of_redis_is_not_told(tmp_path: Path) -> None:
    for url in ("redis://:0f7d9c4b1e2a@127.0.0.1:1/0", "redis://127.0.0.1:1/0?password=0f7d9c4b1e2a"):
        error = error_of(dflash_stack("prepare", "run", "--config", str(DEMO), runs=tmp_path, redis_url=url))
        assert "Redis at 127.0.0.1:1/0: " in error
        assert "0f7d9c4b1e2a" not in error


@pytest.mark.parametrize("port", ["0", "65536"])
def test_an_impossible_port_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    for command in ("metrics", "demo"):
        finished = dflash_stack(command, "--port", port, runs=tmp_path)
        assert finished.returncode == 2
        assert "--port" in finished.stderr
        assert "Traceback" not in finished.stderr
    monkeypatch.setenv("DFLASH_METRICS_PORT", port)
    assert "DFLASH_METRICS_PORT" in error_of(dflash_stack("worker", "merge", runs=tmp_path))


def test_an_impossible_environment_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_METRICS_PORT", "many")
    assert "DFLASH_METRICS_PORT" in error_of(dflash_stack("status", "run", runs=tmp_path))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RedisConnectionError("Connection closed by server."), "Redis: Connection closed by server.;"),
        (PermissionError(errno.EACCES, "Permission denied", "/runs/r/run.json"), "/runs/r/run.json: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "/runs/r"), "/runs/r: Read-only file system"),
    ],
)
def test_what_fails_while_a_command_runs_is_one_line(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {told}")
    assert printed.count("\n") == 1


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FileNotFoundError("a file of its own")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(FileNotFoundError):
        cli.main()


@pytest.mark.parametrize("hours", ["1e12", "nan", "inf"])
def test_a_time_that_never_ends_is_refused(tmp_path: Path, hours: str) -> None:
    finished = dflash_stack("resume", "run", "--max-hours", hours, runs=tmp_path)
    assert finished.returncode == 2
    assert "--max-hours" in finished.stderr
