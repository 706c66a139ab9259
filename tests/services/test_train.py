"""The trainer's jobs on a real queue, by a worker in the trainer's own environment, with a tiny target."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from redis import Redis

from services.chunks import Chunk
from services.environments import interpreter
from services.files import publish_json, read_json
from services.queues import enqueue, job_id, job_state
from services.records import SAMPLE_SCHEMA, Prompt, write_prompts
from services.runs import Run, create_run
from services.settings import Settings

MakeRun = Callable[..., tuple[Run, Chunk, Settings]]

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
DRAFT = {"mask_token_id": 3, "num_layers": 1, "block_size": 4, "target_layer_ids": [1]}


@pytest.fixture
def run(make_run: MakeRun, tmp_path: Path) -> Run:
    """A run whose dataset is merged: ten samples for a tiny target, and two held-out prompts."""
    target = tmp_path / "tiny"
    subprocess.run([interpreter("trainer"), ROOT / "tests/services/tiny_target.py", target], check=True)
    _, _, settings = make_run([[5, 6]], target)
    content = settings.model_dump(mode="json")
    content["train"] |= {"draft": DRAFT, "steps": 2000, "device": "cpu", "dtype": "float32", "target_dtype": "float32"}
    content["train"] |= {"token_budget": 64, "max_length": 64, "checkpoint_every": 1000, "log_every": 5, "anchors": 4}
    content["evaluate"] |= {"max_new_tokens": 8, "device": "cpu", "dtype": "float32"}
    content["sources"][0]["held_out"] = 2
    run = create_run(tmp_path / "other", "t", Settings.model_validate(content))
    run.root.rename(tmp_path / "runs" / "t")
    run = Run(tmp_path / "runs" / "t")
    rows = [
        {
            "input_ids": [(7 * row + column) % 90 + 4 for column in range(24)],
            "loss_mask": [0] * 8 + [1] * 16,
            "seq_len": 24,
        }
        for row in range(10)
    ]
    run.dataset.mkdir()
    with pa.ipc.new_stream(str(run.dataset / "data-00000.arrow"), SAMPLE_SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA))
    publish_json(run.dataset / "state.json", {"_data_files": [{"filename": "data-00000.arrow"}], "_fingerprint": "f"})
    run.held_out("s").parent.mkdir()
    write_prompts(run.held_out("s"), [Prompt(f"h{number}", "s", "[]", None, [9, 8, number]) for number in (10, 11)])
    return run


@pytest.fixture
def start_worker(redis: Redis) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    workers: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [interpreter("trainer"), "-m", "services.stack", "worker", "train"]
        workers.append(subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), start_new_session=True))
        return workers[-1]

    yield start
    for worker in workers:
        # It passes the signal on to its job, which is in a process group of its own.
        if worker.poll() is None:
            worker.terminate()
        try:
            worker.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            raise


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def in_session(session: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if session_of(pid) == session]


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def set_steps(run: Run, steps: int) -> None:
    content = read_json(run.record)
    content["settings"]["train"]["steps"] = steps
    run.record.unlink()
    publish_json(run.record, content)


def test_training_evaluating_and_exporting_through_the_queue(
    run: Run, redis: Redis, start_worker: Callable[[], subprocess.Popen[bytes]]
) -> None:
    set_steps(run, 20)
    start_worker()
    for names in (("train", "t"), ("evaluate", "t", "before"), ("evaluate", "t", "after"), ("export", "t")):
        assert enqueue("train", redis, *names, job_timeout=120)
        name = job_id("train", *names)
        wait_until(lambda name=name: job_state(name, redis).state in {"finished", "failed"})  # type: ignore[misc]
        assert job_state(name, redis) == ("finished", None)
    assert run.checkpoint(20).is_dir()
    assert (run.export / "model.safetensors").is_file()
    for which in ("before", "after"):
        report = read_json(run.evaluation(which))
        assert report["overall"]["prompts"] == 2
        assert report["lossless"]["lossless"]


def test_a_stopped_worker_leaves_a_checkpoint_from_which_the_next_goes_on(
    run: Run, redis: Redis, start_worker: Callable[[], subprocess.Popen[bytes]]
) -> None:
    set_steps(run, 1_000_000)
    enqueue("train", redis, "train", "t", job_timeout=600)
    worker = start_worker()
    wait_until(run.training_metrics.is_file)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=60) == 0
    checkpoints = sorted(path.name for path in (run.training / "checkpoints").glob("step-*"))
    stopped_at = int(checkpoints[-1].removeprefix("step-"))
    assert 0 < stopped_at < 1_000_000
    start_worker()
    resumed = run.training / "run.json"
    wait_until(lambda: read_json(resumed)["resumed_at_step"] == stopped_at)


def test_a_killed_worker_leaves_no_process_and_its_training_a_checkpoint(
    run: Run, redis: Redis, start_worker: Callable[[], subprocess.Popen[bytes]]
) -> None:
    enqueue("train", redis, "train", "t", job_timeout=600)
    worker = start_worker()
    wait_until(run.training_metrics.is_file)
    # The worker, RQ's scheduler, the job, and the training itself.
    assert len(in_session(worker.pid)) >= 4
    worker.kill()
    worker.wait()
    wait_until(lambda: not in_session(worker.pid), 60)
    assert list((run.training / "checkpoints").glob("step-*"))


def test_a_mistake_reaches_whoever_waits_as_one_line(
    run: Run, redis: Redis, start_worker: Callable[[], subprocess.Popen[bytes]]
) -> None:
    (run.dataset / "state.json").unlink()
    enqueue("train", redis, "train", "t", job_timeout=120)
    start_worker()
    name = job_id("train", "train", "t")
    wait_until(lambda: job_state(name, redis).state == "failed")
    error = job_state(name, redis).error
    assert error is not None
    assert "no dataset here (state.json is missing)" in error
    assert "\n" not in error
