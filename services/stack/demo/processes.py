"""The processes that the demo starts, and how they all end with it.

Every process inherits a mark in its environment. Ending the demo, or taking up one that was killed, means
ending whatever carries the mark: servers, their children, and jobs whose worker died before them.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from services.errors import UserError
from services.lifetime import ends_with_this_process

MARK = "DFLASH_DEMO"
# Seconds: for each process to end its own children in order, then for whatever is left, then before giving up.
ORDERLY_GRACE = 6.0
GRACE = 10.0


@dataclass
class Processes:
    """What runs for the demo in `folder`; the mark's value is the folder's path."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    servers: set[str] = field(default_factory=set)

    @property
    def mark(self) -> str:
        return f"{MARK}={self.folder.resolve()}"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def serve(self, name: str, command: Sequence[str | Path]) -> None:
        """Start a process that others use until they end: it is ended after them."""
        self.servers.add(name)
        self.start(name, command)

    def start(self, name: str, command: Sequence[str | Path], environment: dict[str, str] | None = None) -> None:
        """Start a process whose output goes to a log, and which ends when this one does."""
        self.log(name).parent.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(environment),
                start_new_session=True,
                preexec_fn=ends_with_this_process(),
            )

    def run(self, name: str, command: Sequence[str | Path]) -> None:
        """Run a process to its end.

        Raises:
            UserError: it failed; its last line and its log are named.
        """
        self.start(name, command)
        if self.running.pop(name).wait() != 0:
            raise UserError(f"{name} failed: {self._last_line(name)}; see {self.log(name)}")

    def check(self) -> None:
        """Raises UserError when a process that should still run has ended."""
        for name, process in self.running.items():
            if process.poll() is not None:
                raise UserError(
                    f"{name} ended with status {process.returncode}: {self._last_line(name)}; see {self.log(name)}"
                )

    def stop(self, *names: str) -> None:
        """End the named processes, and wait for them."""
        for name in names:
            process = self.running.pop(name)
            _end(partial(_in_session, process.pid))
            process.wait()

    def stop_all(self) -> None:
        """End everything that carries the mark, whoever started it.

        Those that this demo started are asked first: a worker passes it on to its job, which saves a checkpoint,
        and needs Redis to end in order.
        """
        workers = [process for name, process in self.running.items() if name not in self.servers]
        servers = [process for name, process in self.running.items() if name in self.servers]
        for asked in (workers, servers):
            for process in asked:
                _send(process.pid, signal.SIGTERM)
            _wait_until_ended(asked, ORDERLY_GRACE)
        _end(lambda: _marked(self.mark))
        for process in self.running.values():
            process.wait()
        self.running.clear()

    def environment(self, additional: dict[str, str] | None = None) -> dict[str, str]:
        name, _, value = self.mark.partition("=")
        return {**os.environ, **_fast_arithmetic(), name: value, **(additional or {})}

    def _last_line(self, name: str) -> str:
        lines = self.log(name).read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"


@contextmanager
def processes_in(folder: Path) -> Iterator[Processes]:
    """Processes of the demo in `folder`: leftovers of a killed one are ended first, all are ended at the end."""
    processes = Processes(folder)
    processes.stop_all()
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield processes
    finally:
        signal.signal(signal.SIGTERM, previous)
        processes.stop_all()


def check_port_is_free(port: int, what: str, option: str) -> None:
    """Raises UserError when something listens on the loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"{what}: port {port} is in use; stop what listens there, or give another {option}"
            ) from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _fast_arithmetic() -> dict[str, str]:
    # A waiting thread that spins takes a core from the very thread that it waits for, once anything else runs here.
    passive = {"OMP_WAIT_POLICY": "passive"}
    # MKL takes its slowest path for few rows on processors that are not Intel's, unless one is named.
    named = {} if "avx512f" in Path("/proc/cpuinfo").read_text() else {"MKL_CBWR": "AVX2"}
    return passive | named


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _end(find: Callable[[], list[int]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE
        signalled: set[int] = set()
        while (pids := find()) and time.monotonic() < deadline:
            for pid in set(pids) - signalled:
                signalled.add(pid)
                _send(pid, number)
            time.sleep(0.1)


def _wait_until_ended(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _in_session(session: int) -> list[int]:
    return [pid for pid in _alive() if _session(pid) == session]


def _marked(mark: str) -> list[int]:
    return [pid for pid in _alive() if pid != os.getpid() and mark.encode() in _environment(pid)]


def _alive() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and not _is_zombie(entry)]


def _is_zombie(entry: Path) -> bool:
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
