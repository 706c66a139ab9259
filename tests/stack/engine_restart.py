"""The engine is restarted while a run generates: its containers come back by themselves, and every prompt ends once.

`make test-engine-restart` runs it, where no other container runs on this machine's engine.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

from run_in_containers import PROMPTS, RUN, answered, check_totals, prepared_run
from stack_under_test import StackUnderTest, wait_until

PID_FILE = Path("/var/run/docker.pid")
SERVICES = ("redis", "sglang", "producer", "tokenizer")


def restart_engine() -> None:
    """Restart dockerd by systemd where that started it, and else as its own command line says."""
    by_systemd = subprocess.run(["systemctl", "is-active", "--quiet", "docker"], capture_output=True, check=False)
    if by_systemd.returncode == 0:
        subprocess.run(["systemctl", "restart", "docker"], check=True)
        return
    pid = int(PID_FILE.read_text())
    process = Path("/proc") / str(pid)
    command = process.joinpath("cmdline").read_text().split("\0")[:-1]
    variables = dict(line.split("=", 1) for line in process.joinpath("environ").read_text().split("\0") if "=" in line)
    log = (process / "fd" / "2").resolve()
    if not log.is_file():
        log = Path(os.devnull)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not process.exists(), "the engine ends")
    with log.open("ab") as output:
        subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def answers() -> bool:
    return subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0


def healthy(stack: StackUnderTest) -> bool:
    states = {one["Service"]: one["Health"] for one in stack.containers(*SERVICES)}
    return states == dict.fromkeys(SERVICES, "healthy")


def started(stack: StackUnderTest) -> dict[str, str]:
    """When each service's container was started last."""
    described = subprocess.run(
        ["docker", "inspect", *(one["ID"] for one in stack.containers(*SERVICES))],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {one["Name"]: one["State"]["StartedAt"] for one in json.loads(described)}


def test_a_run_goes_on_by_itself_after_the_engine_was_restarted(tmp_path: Path) -> None:
    with prepared_run(tmp_path, f"dflash-restart-{os.getpid()}") as stack:
        stack.operator("submit", RUN, "--no-wait")
        wait_until(lambda: answered(stack) > 0, "the first answers")
        before = started(stack)
        running = subprocess.run(["docker", "ps", "--quiet"], capture_output=True, text=True, check=True).stdout.split()
        assert len(running) == len(before), "other containers run on this engine"
        restart_engine()
        wait_until(answers, "the engine answers")
        wait_until(lambda: healthy(stack), "every service is healthy again")
        after = started(stack)
        assert after.keys() == before.keys()
        assert all(after[name] > before[name] for name in before)
        interrupted_at = answered(stack)
        assert interrupted_at < PROMPTS
        wait_until(lambda: answered(stack) > interrupted_at, "the run goes on", 600)
        stack.operator("submit", RUN)
        check_totals(stack, tmp_path / "runs")
