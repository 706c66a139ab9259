"""Running `dflash` as a child process: a job must not initialise CUDA in RQ's forked process (pytorch#40403)."""

import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import structlog

from services.errors import UserError
from services.lifetime import ends_with_this_process

# A traceback of Python ends with the same status: the line tells them apart.
USER_ERROR_STATUS, USER_ERROR_LINE = 1, "error: "


class StoppedError(Exception):
    """The process was told to stop and did so after a checkpoint; the job's retry goes on from there."""


def run_dflash(log: Path, *arguments: str | Path) -> None:
    """Run the command `dflash` with its output going to `log`, and pass SIGTERM on to it.

    Should this process be killed, the kernel sends it SIGTERM too: it ends with a checkpoint.

    Raises:
        UserError: it told of a user's mistake; its line is passed on.
        StoppedError: it was stopped by SIGTERM.
        ChildProcessError: it ended in any other way.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "dflash", *map(str, arguments)]
    stopped = False
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=ends_with_this_process(),
        )

        def stop(number: int, _frame: FrameType | None) -> None:
            nonlocal stopped
            stopped = True
            process.send_signal(number)

        previous = signal.signal(signal.SIGTERM, stop)
        try:
            status = process.wait()
        finally:
            signal.signal(signal.SIGTERM, previous)
    structlog.get_logger().info("dflash_ended", command=arguments[0], status=status, log=str(log))
    if stopped:
        raise StoppedError(f"dflash {arguments[0]} was stopped; the next job goes on from its checkpoint")
    if status != 0:
        said = _last_line(log, begin)
        if status == USER_ERROR_STATUS and said.startswith(USER_ERROR_LINE):
            raise UserError(said.removeprefix(USER_ERROR_LINE))
        raise ChildProcessError(f"dflash {arguments[0]} ended with status {status}: {said}; see {log}")


def _last_line(log: Path, begin: int) -> str:
    """Return the last line of what is in the log from the byte `begin` on."""
    lines = log.read_bytes()[begin:].decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"
