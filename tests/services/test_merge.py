"""Assembling and merging by workers in their own environment, and the commands that wait for them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from services.chunks import plan_chunks
from services.environments import interpreter
from services.errors import UserError
from services.files import publish_json, read_json
from services.queues import enqueue
from services.records import Completion, Prompt, write_completions, write_prompts
from services.runs import Run, create_run
from services.settings import Settings
from services.stack.cli import app
from services.target import tokenizer_fingerprint
from tests.making_runs import VOCABULARY, MakeRun

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(make_run: MakeRun) -> Settings:
    _, _, settings = make_run([[5, 6]])
    (settings.target.path / "tokenizer.json").write_text("{}")
    return settings


@pytest.fixture
def workers(redis: Redis) -> Iterator[None]:
    command = [interpreter("tokenizer"), "-m", "services.stack", "worker", "assemble", "merge"]
    started = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.DEVNULL)
    yield
    started.terminate()
    started.wait(60)


def generated(runs: Path, name: str, settings: Settings, answers: list[list[int]], redis: Redis) -> Run:
    """A run whose answers are there, and are to be assembled."""
    run = create_run(runs, name, settings)
    run.prompts("s").parent.mkdir()
    write_prompts(run.prompts("s"), [Prompt(f"p{n}", "s", "[]", None, [5, 6, n]) for n in range(len(answers))])
    fingerprint = tokenizer_fingerprint(settings.target.path)
    publish_json(run.prepared, {"tokenizer": fingerprint, "template": "t", "vocabulary_size": VOCABULARY})
    (chunk,) = plan_chunks(run, settings)
    run.completions(chunk.chunk).parent.mkdir()
    completions = [
        Completion(f"p{n}", "completed", None, "stop", answer, 1, 0.1, None) for n, answer in enumerate(answers)
    ]
    write_completions(run.completions(chunk.chunk), completions)
    enqueue("assemble", redis, "assemble", name, chunk.chunk, job_timeout=60)
    return run


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def wait_until_assembled(*runs: Run) -> None:
    for run in runs:
        # The command waits for the job that is enqueued already.
        assert command("submit", run.name).exit_code == 0


@pytest.mark.usefixtures("workers")
def test_runs_are_merged_into_datasets_of_their_own_and_of_each_other(
    redis: Redis, settings: Settings, tmp_path: Path
) -> None:
    one = generated(tmp_path / "runs", "one", settings, [[7, 8], [9, 8]], redis)
    # Its first sample is one of the other run's.
    two = generated(tmp_path / "runs", "two", settings, [[7, 8], [10, 8], [11, 8]], redis)
    for run in (one, two):
        publish_json(run.summary("s-00000"), {"completed": 1, "rejected": {}, "failed": {}, "output_tokens": 1})
    wait_until_assembled(one, two)

    merged = command("merge", "one")
    assert merged.exit_code == 0, merged.output
    assert read_json(one.merged)["after"]["samples"] == 2
    before = {path.name: path.read_bytes() for path in one.dataset.glob("*.arrow")}

    dataset = tmp_path / "both"
    for _ in range(2):
        merged = command("merge", one.dataset, "two", "--to", dataset, "--verify")
        assert merged.exit_code == 0, merged.output
    content = read_json(dataset / "merge.json")
    assert content["before"]["samples"] == 2
    assert content["runs"]["two"]["dropped"] == {"in_base": 1}
    assert content["after"]["samples"] == 4
    assert content["verified"]
    assert {path.name: path.read_bytes() for path in one.dataset.glob("*.arrow")} == before

    other = command("merge", one.dataset, "one", "--to", dataset)
    assert isinstance(other.exception, UserError)
    assert f"{dataset} is there, made of base {one.dataset} and runs two" in str(other.exception)


@pytest.mark.usefixtures("workers")
def test_what_cannot_be_merged_is_told_to_whoever_waits(redis: Redis, settings: Settings, tmp_path: Path) -> None:
    run = generated(tmp_path / "runs", "one", settings, [[7, 8]], redis)
    publish_json(run.summary("s-00000"), {"completed": 1, "rejected": {}, "failed": {}, "output_tokens": 1})
    wait_until_assembled(run)
    missing = command("merge", tmp_path / "missing", "one", "--to", tmp_path / "dataset")
    assert isinstance(missing.exception, UserError)
    assert f"corpus {tmp_path / 'missing'}: No such file" in str(missing.exception)
    assert not (tmp_path / "dataset").exists()
    several = command("merge", "one", "two")
    assert "say with --to which dataset" in str(several.exception)
