"""The trainer gets an image with another torch while it trains, and the old one back: it goes on at its step."""

# ruff: noqa: T201  (the recorded changes are for docs/operating.md)
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from stack_under_test import ROOT, VERSION, StackUnderTest, make_stack, wait_until

from services.environments import interpreter
from services.files import publish_json
from services.records import SAMPLE_SCHEMA
from services.runs import create_run
from services.settings import Settings, check_settings, load_settings

pytestmark = [pytest.mark.stack, pytest.mark.slow]
FORMER = "2.13.0+cpu"
# An image with another torch, such as dflash-stack/trainer:cu128-dev. With none, the other one is an image whose torch
# only says that it is another version: what is proved then is that a swapped image trains.
OTHER_IMAGE = os.environ.get("OTHER_TRAINER_IMAGE")
RENAMED = "2.12.9+cpu"
RENAMED_TORCH = f"""
FROM dflash-stack/trainer:cpu-{VERSION}
USER root
RUN cd /opt/environment/lib/python3.11/site-packages \\
    && sed -i "s/^__version__ = .*/__version__ = '{RENAMED}'/" torch/version.py \\
    && sed -i "s/^Version: .*/Version: {RENAMED}/" torch-*.dist-info/METADATA \\
    && mv torch-*.dist-info "torch-{RENAMED}.dist-info" \\
    && sed -i "s/{FORMER}/{RENAMED}/" /opt/image/contents.json
USER 10001:10001
"""
RUN = "r"


@dataclass(frozen=True)
class Other:
    """The image to go to: how `dflash-stack swap` is asked for it, and the version of its torch."""

    asked: tuple[str, ...]
    torch: str


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackUnderTest]:
    """Redis and a trainer that trains a tiny drafter, without end."""
    folder = tmp_path_factory.mktemp("swap")
    target = folder / "target"
    subprocess.run([interpreter("trainer"), ROOT / "tests/services/tiny_target.py", target], check=True)
    for path in target.iterdir():
        path.chmod(0o644)  # the containers' user is another
    settings = load_settings(ROOT / "config" / "demo.yaml")
    (folder / "data").symlink_to(ROOT / "var" / "demo" / "data")
    half_a_core = folder / "half_a_core.yaml"  # is enough for steps without end
    half_a_core.write_text("services: {trainer: {cpus: 0.5}}\n")
    variables = {"MODEL_DIR": str(target), "COMPOSE_FILE": f"compose.cpu.yaml:{half_a_core}"}
    stack = make_stack(folder, settings, f"dflash-swap-{os.getpid()}", variables)
    stack.compose("build", "trainer")
    try:
        stack.up("redis", "trainer")
        put_run(stack, make_run(folder, settings))
        stack.compose("exec", "--no-TTY", "trainer", "python", "-m", "services.stack", "train", RUN, "--no-wait")
        yield stack
    finally:
        stack.down()


@pytest.fixture(scope="module")
def other(stack: StackUnderTest) -> Iterator[Other]:
    """The image with another torch."""
    if OTHER_IMAGE:
        label = '{{index .Config.Labels "dflash-stack.torch"}}'
        described = ["docker", "image", "inspect", "--format", label, OTHER_IMAGE]
        torch = subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
        yield Other((OTHER_IMAGE,), torch)
        return
    tag = f"other-{os.getpid()}"
    name = f"dflash-stack/trainer:{tag}"
    subprocess.run(["docker", "build", "--quiet", "--tag", name, "-"], input=RENAMED_TORCH, text=True, check=True)
    yield Other((tag, "--accept-versions"), RENAMED)
    subprocess.run(["docker", "image", "rm", "--force", name], check=True, capture_output=True)


def make_run(folder: Path, settings: Settings) -> Path:
    """A run whose dataset is merged, for as many steps as there is time."""
    content = settings.model_dump(mode="json")
    content["target"]["path"] = "/model"
    content["train"] |= {"steps": 10**7, "checkpoint_every": 10**6, "log_every": 5, "anchors": 4}
    content["train"] |= {"token_budget": 64, "max_length": 64}
    content["train"]["draft"] = {"mask_token_id": 3, "num_layers": 1, "block_size": 4, "target_layer_ids": [1]}
    run = create_run(folder / "runs", RUN, check_settings(content, where="swap"))
    rows = [
        {"input_ids": [(7 * row + n) % 90 + 4 for n in range(24)], "loss_mask": [0] * 8 + [1] * 16, "seq_len": 24}
        for row in range(10)
    ]
    run.dataset.mkdir()
    with pa.ipc.new_stream(str(run.dataset / "data-00000.arrow"), SAMPLE_SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA))
    publish_json(run.dataset / "state.json", {"_data_files": [{"filename": "data-00000.arrow"}], "_fingerprint": "f"})
    publish_json(run.merged, {})
    return folder / "runs"


def put_run(stack: StackUnderTest, runs: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        file.add(runs, arcname=".")
    command = ["docker", "compose", "--env-file", str(stack.env_file), "exec", "--no-TTY", "trainer"]
    extract = [*command, "tar", "--extract", "--no-same-owner", "--no-same-permissions", "--directory=/runs"]
    subprocess.run(extract, cwd=ROOT, input=archive.getvalue(), check=True)


def in_trainer(stack: StackUnderTest, script: str) -> str:
    return stack.compose("exec", "--no-TTY", "trainer", "sh", "-c", f"cd /runs/{RUN}/train && {script}").stdout


def steps(stack: StackUnderTest) -> list[int]:
    lines = in_trainer(stack, "cat metrics.jsonl 2>/dev/null || true").splitlines()
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def newest_checkpoint(stack: StackUnderTest) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(in_trainer(stack, "cat $(ls -d checkpoints/step-* | tail -1)/state.json"))
    return content


def without_build(version: str) -> str:
    """2.10.0 of 2.10.0+cu128: torch names its build where the package's own version may not."""
    return version.partition("+")[0]


def test_training_goes_on_at_its_step_in_the_other_image_and_back(stack: StackUnderTest, other: Other) -> None:
    wait_until(lambda: len(steps(stack)) > 2, "the first steps")
    # A build for cards is larger in memory on a CPU too, which is not what is asked here.
    told = stack.operate("swap", "trainer", *other.asked, "--margin", "1000", "--why", "a test").stdout
    assert f"torch {FORMER} -> {other.torch}" in told
    assert "/train/checkpoints/step-" in told
    first = newest_checkpoint(stack)
    assert first["run"]["versions"]["torch"] == FORMER
    stopped_at = first["progress"]["step"]
    wait_until(lambda: steps(stack)[-1] > stopped_at + 10, "steps of the other image")

    stack.operate("rollback", "trainer")
    second = newest_checkpoint(stack)
    assert without_build(second["run"]["versions"]["torch"]) == without_build(other.torch)
    assert second["progress"]["step"] > stopped_at + 10
    wait_until(lambda: steps(stack)[-1] > second["progress"]["step"] + 10, "steps after the rollback")

    # No step was lost or done twice at either change.
    done = steps(stack)
    assert done == sorted(set(done))
    assert [step for step in done if step % 5 == 0] == list(range(5, done[-1] + 1, 5))
    lines = (stack.env_file.with_name("operations") / "releases.jsonl").read_text().splitlines()
    changes = [
        (entry["action"], entry["event"], entry["to"]["contents"]["torch"])
        for entry in map(json.loads, lines)
        if entry["event"] != "measured"
    ]
    assert changes == [
        ("swap", "begun", other.torch),
        ("swap", "done", other.torch),
        ("rollback", "begun", FORMER),
        ("rollback", "done", FORMER),
    ]
    history = stack.operate("history").stdout
    print(f"\n{told}\ncheckpoints of the changes: step {stopped_at}, step {second['progress']['step']}\n{history}")
