"""The real SGLang server on the CPU, in its own environment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 400.0  # seconds


@contextmanager
def sglang(target: Path, log: Path, *options: str) -> Iterator[str]:
    """Serve `target` with further options of SGLang's server and yield the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(ROOT / ".envs/sglang/bin/python"), str(ROOT / "images/sglang/cpu/serve.py")]
    # Ids go in and out: the tiny targets have no tokenizer.
    command += ["--model", str(target), "--port", str(port), "--skip-tokenizer-init", *options]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_TIMEOUT
        while not _is_healthy(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SGLang did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def generate(url: str, prompt: list[int], **request: Any) -> dict[str, Any]:
    """Answer one prompt greedily; `request` holds further keys, sampling parameters among them."""
    sampling = {"temperature": 0, **request.pop("sampling_params", {})}
    body = {"input_ids": prompt, "sampling_params": sampling, **request}
    answer: dict[str, Any] = httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status().json()
    return answer


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
