"""SGLang's image for NVIDIA cards, built with its real CUDA wheels, serves on a machine with no GPU.

`make test-production-image` runs it, before a version of SGLang or of the toolchain is taken in; its last result is in
docs/images.md. The stand-in for compiled kernels is mounted from images/sglang/cpu, which no GPU image holds.
"""

# ruff: noqa: T201  (what it measures is for docs/images.md)
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.environments import interpreter

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "var/models/SmolLM2-135M-Instruct"
VARIANT = os.environ.get("SGLANG_VARIANT", "cu130")
TAG = f"dflash-stack/sglang:{VARIANT}-production-test"
NAME = "dflash-stack-production-test"
PROMPT_IDS = [504, 3575, 282, 4649, 314]
NEW_TOKENS = 16


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def image() -> str:
    """The image, built as `docker compose build` does. It stays, for the next run."""
    began = time.monotonic()
    arguments = [f"{name}={os.environ[name]}" for name in ("BASE_IMAGE", "PIP_NO_CACHE_DIR") if name in os.environ]
    wheels = [f"--build-context=wheelhouse={os.environ['WHEELHOUSE']}"] if "WHEELHOUSE" in os.environ else []
    built = docker(
        "buildx", "build", "--progress=plain", "--tag", TAG, "--file", "images/sglang/Dockerfile", *wheels,
        "--build-arg", f"VARIANT={VARIANT}", *(part for argument in arguments for part in ("--build-arg", argument)),
        ".",
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-6000:]
    size = int(docker("image", "inspect", "--format", "{{.Size}}", TAG).stdout)
    print(f"\n{TAG}: {size / 1e9:.1f} GB, built in {time.monotonic() - began:.0f} s")
    return TAG


@pytest.fixture(scope="module")
def address(image: str) -> Iterator[str]:
    """A server in the image, on the CPU."""
    docker("rm", "--force", NAME)
    started = docker(
        "run", "--detach", "--name", NAME, "--publish", "127.0.0.1::30000", "--shm-size", "2g", "--env", "HOME=/tmp",
        "--volume", f"{ROOT}/images/sglang/cpu:/opt/serve:ro", "--volume", f"{MODEL.resolve()}:/model:ro",
        "--entrypoint", "dumb-init", image,
        "python", "/opt/image/start.py", "python", "/opt/serve/serve.py", "--model", "/model", "--host", "0.0.0.0",
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    try:
        where = f"http://{docker('port', NAME, '30000/tcp').stdout.split()[0]}"
        wait_until_it_answers(where)
        yield where
    finally:
        docker("rm", "--force", NAME)


def wait_until_it_answers(where: str) -> None:
    for _ in range(1200):
        try:
            urllib.request.urlopen(f"{where}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            running = docker("inspect", "--format", "{{.State.Running}}", NAME).stdout.strip()
            assert running == "true", docker("logs", "--tail", "40", NAME)
            time.sleep(1)
        else:
            return
    pytest.fail(str(docker("logs", "--tail", "40", NAME)))


def greedy_ids_of_transformers() -> list[int]:
    program = f"""
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(MODEL)!r}, dtype=torch.float32)
ids = torch.tensor([{PROMPT_IDS}])
with torch.no_grad():
    for _ in range({NEW_TOKENS}):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
print(ids[0, {len(PROMPT_IDS)}:].tolist())
"""
    command = [str(interpreter("trainer")), "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ids: list[int] = json.loads(printed)
    return ids


def test_doctor_finds_nothing_in_it(image: str) -> None:
    checked = docker("run", "--rm", "--entrypoint", "python", image, "-m", "doctor", "check")
    print(f"\n{checked.stdout}")
    assert checked.returncode == 0, checked.stdout


def test_it_answers_as_transformers_does(address: str) -> None:
    body = {
        "input_ids": PROMPT_IDS,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{address}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as reply:
        answer = json.load(reply)
    print(f"\n{NEW_TOKENS} tokens in {time.monotonic() - began:.1f} s: {answer['text']!r}")
    assert answer["output_ids"] == greedy_ids_of_transformers()


@pytest.mark.parametrize("option", ["--attention-backend=fa3", "--attention-backend=triton"])
def test_it_does_not_start_with_an_option_that_cannot_work_on_the_card(image: str, option: str) -> None:
    started = docker("run", "--rm", image, "--model-path=/model", option)
    assert started.returncode == 1
    assert f"FAIL  options      {option.replace('=', ' ')}: " in started.stdout
    assert "remedy: --attention-backend flashinfer" in started.stdout
