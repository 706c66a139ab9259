"""What the demo starts ends with it, however it ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.errors import UserError
from services.stack.demo.processes import Processes, check_port_is_free, processes_in

SLEEP = [sys.executable, "-c", "import time; time.sleep(120)"]
# A worker that starts a child in a session of its own and prints its pid, as a job's process does.
WITH_CHILD = [
    sys.executable,
    "-c",
    "import subprocess, sys, time;"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'], start_new_session=True);"
    "print(child.pid, flush=True); time.sleep(120)",
]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.05)


def child_of(processes: Processes, name: str) -> int:
    deadline = time.monotonic() + 10
    while not (text := processes.log(name).read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(text)


def test_everything_ends_with_the_demo_children_in_other_sessions_included(tmp_path: Path) -> None:
    with processes_in(tmp_path) as processes:
        processes.start("server", SLEEP)
        processes.start("worker", WITH_CHILD)
        pids = [process.pid for process in processes.running.values()] + [child_of(processes, "worker")]
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids))


def test_an_interrupt_ends_everything(tmp_path: Path) -> None:
    pids = []

    def interrupted_demo() -> None:
        with processes_in(tmp_path) as processes:
            processes.start("server", SLEEP)
            pids.append(processes.running["server"].pid)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        interrupted_demo()
    assert not is_running(pids[0])


def test_leftovers_of_a_killed_demo_are_ended_by_the_next(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from services.stack.demo.processes import Processes;"
        f"p = Processes(Path({str(tmp_path)!r})); p.start('worker', {WITH_CHILD!r}); time.sleep(120)"
    )
    demo = subprocess.Popen([sys.executable, "-c", script])
    processes = Processes(tmp_path)
    while not processes.log("worker").is_file():
        time.sleep(0.05)
    orphan = child_of(processes, "worker")
    demo.kill()
    demo.wait()
    assert is_running(orphan)
    with processes_in(tmp_path):
        pass
    wait_until_gone(orphan)


def test_a_demo_in_another_folder_is_left_alone(tmp_path: Path) -> None:
    with processes_in(tmp_path / "one") as one:
        one.start("server", SLEEP)
        with processes_in(tmp_path / "other"):
            pass
        assert is_running(one.running["server"].pid)


def test_a_process_that_ended_is_reported_with_its_last_line(tmp_path: Path) -> None:
    with processes_in(tmp_path) as processes:
        processes.start("server", [sys.executable, "-c", "raise SystemExit('out of luck')"])
        processes.running["server"].wait()
        with pytest.raises(UserError, match=r"server ended with status 1: out of luck; see .*server\.log"):
            processes.check()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(UserError, match=f"SGLang server: port {port} is in use; .* another --port"):
            check_port_is_free(port, "SGLang server", "--port")
    check_port_is_free(port, "SGLang server", "--port")


def test_a_worker_ends_before_the_server_that_it_needs(tmp_path: Path) -> None:
    # The worker writes whether the server still answers when it is asked to end.
    server = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
        "time.sleep(60)"
    )
    with processes_in(tmp_path) as processes:
        processes.serve("server", [sys.executable, "-c", server])
        port = child_of(processes, "server")
        worker = (
            "import signal, socket, sys, time\n"
            "def end(*_):\n"
            f"    time.sleep(0.5); socket.create_connection(('127.0.0.1', {port})); print('in order', flush=True)\n"
            "    sys.exit()\n"
            "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)"
        )
        processes.start("worker", [sys.executable, "-c", worker])
        deadline = time.monotonic() + 10
        while "ready" not in processes.log("worker").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert processes.log("worker").read_text().split() == ["ready", "in", "order"]
