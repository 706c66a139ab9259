"""Starts the processes of a training run, watches over them, and ends them all together.

The launcher holds neither torch nor a device. Each rank is a process group of its own, which the kernel ends with the
launcher. The run ends when the ranks are done; when one of them dies or hangs, the others are ended at once. The first
SIGTERM or Ctrl-C asks the ranks to stop after a checkpoint, the second ends them.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from dflash.config import TrainingConfig, role_of
from dflash.errors import DflashError, LostRankError
from dflash.parts import WAITING, Beats

# What a shell reports for a process that SIGTERM ended: the run is whole but not finished.
INTERRUPTED = 143
# How a rank ends that lost another one, and a run that lost a rank.
LOST_PEER = 70
POLL_SECONDS = 0.2
# For starting Python and importing torch, which count as no stall.
START_SECONDS = 600.0
# A rank that fails takes others with it: their words may come before its own.
LAST_WORDS_SECONDS = 2.0


class Place(NamedTuple):
    """What a rank is told: the run, its number, where the ranks meet, and the files it reports to."""

    config: TrainingConfig
    rank: int
    launcher: int
    meeting_point: Path
    reports: int
    beats: int

    def to_json(self) -> str:
        """Return the place as one line."""
        value = self._replace(config=self.config.model_dump_json(), meeting_point=str(self.meeting_point))  # type: ignore[arg-type]
        return json.dumps(value._asdict())

    @classmethod
    def from_json(cls, line: str) -> Place:
        """Read what `to_json` wrote."""
        value = json.loads(line)
        value["config"] = TrainingConfig.model_validate_json(value["config"])
        value["meeting_point"] = Path(value["meeting_point"])
        return cls(**value)


class Outcome(NamedTuple):
    """How a run ended: steps done, its newest checkpoint, and whether it was stopped before the last step."""

    steps: int
    checkpoint: Path
    interrupted: bool


@dataclass
class _Rank:
    number: int
    name: str
    process: subprocess.Popen[str]
    reports: int
    unread: bytes = b""
    error: str | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> bool:
        """Take in what the rank has reported; return whether there may be more."""
        try:
            data = os.read(self.reports, 1 << 16)
        except BlockingIOError:
            return True
        *whole, self.unread = (self.unread + data).split(b"\n")
        self.lines += [json.loads(line) for line in whole]
        return bool(data)

    def kill(self) -> None:
        """End the rank and whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def launch(config: TrainingConfig, on_progress: Callable[[dict[str, Any]], None]) -> Outcome:
    """Run `config` in as many processes as its topology says, until its last step or until it is told to stop.

    Args:
        on_progress: called with each line that the lead reports.

    Raises DflashError when a rank fails, LostRankError when it dies or hangs; no process is left, and the last
    checkpoint is whole.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder:
        return _Launcher(config, Path(folder) / "ranks", on_progress).run()


class _Launcher:
    def __init__(
        self, config: TrainingConfig, meeting_point: Path, on_progress: Callable[[dict[str, Any]], None]
    ) -> None:
        self._config, self._meeting_point, self._on_progress = config, meeting_point, on_progress
        self._beats_file = os.memfd_create("dflash-beats")
        self._beats = Beats(self._beats_file, config.topology.processes)
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()
        self._stops_asked = 0
        self._stepping = False
        self._result: dict[str, Any] | None = None

    def run(self) -> Outcome:
        """Start the ranks and wait for their end."""
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for number in range(self._config.topology.processes):
                self._start(number)
            self._watch()
        finally:
            for rank in self._ranks:
                rank.kill()
                os.close(rank.reports)
            os.close(self._beats_file)
            for signum, handler in previous.items():
                signal.signal(signum, handler)
        return self._outcome()

    def _start(self, number: int) -> None:
        topology = self._config.topology
        role = role_of(number, topology.targets, topology.drafters)
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash.rank"],
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=(writing, self._beats_file),
            # Ctrl-C in a terminal is for the launcher alone, which passes it on.
            start_new_session=True,
        )
        os.close(writing)
        rank = _Rank(number, f"rank {number} ({role})", process, reading)
        self._ranks.append(rank)
        self._selector.register(reading, selectors.EVENT_READ, rank)
        place = Place(self._config, number, os.getpid(), self._meeting_point, writing, self._beats_file)
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(place.to_json() + "\n")
            process.stdin.close()

    def _watch(self) -> None:
        running = list(self._ranks)
        while running:
            self._listen(POLL_SECONDS)
            if self._stops_asked > 1 or (self._stops_asked and not self._stepping):
                return
            for rank in [rank for rank in running if rank.process.poll() is not None]:
                running.remove(rank)
                if rank.process.returncode not in (0, INTERRUPTED):
                    self._fail()
            self._check_beats(running)
        self._listen(0)

    def _listen(self, seconds: float) -> None:
        """Take in reports for at most `seconds`."""
        for key, _ in self._selector.select(seconds):
            rank: _Rank = key.data
            if not rank.read():
                self._selector.unregister(rank.reports)
            for line in rank.lines:
                self._take(rank, line)
            rank.lines = []

    def _take(self, rank: _Rank, line: dict[str, Any]) -> None:
        if "error" in line:
            rank.error = line["error"]
        elif "result" in line:
            self._result = line["result"]
        else:
            self._stepping = self._stepping or "step" in line
            self._on_progress(line)

    def _fail(self) -> None:
        """Raise with what went wrong first: a rank's own words, else a rank that was killed."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while time.monotonic() < deadline and not any(rank.error for rank in self._ranks):
            self._listen(POLL_SECONDS)
            time.sleep(POLL_SECONDS)
        for rank in self._ranks:
            if rank.error:
                raise DflashError(rank.error if len(self._ranks) == 1 else f"{rank.name}: {rank.error}")
        dead = [rank for rank in self._ranks if rank.process.poll() not in (None, 0, INTERRUPTED)]
        first = [rank for rank in dead if rank.process.returncode != LOST_PEER]
        rank = (first or dead)[0]
        status = rank.process.returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        raise LostRankError(
            f"{rank.name} {how}; what it said is above; the last checkpoint in {self._config.output} is whole: "
            "the same command goes on from it"
        )

    def _check_beats(self, running: list[_Rank]) -> None:
        now, limit = time.monotonic(), self._config.stall_seconds
        last = {rank.number: self._beats.last(rank.number) for rank in running}
        started = self._began + START_SECONDS
        stalled = [rank for rank in running if now - (last[rank.number].time or started) > limit]
        # Who only waits for others is not the one that hangs, unless nobody goes on.
        hung = [rank for rank in stalled if last[rank.number].part not in WAITING]
        if len(stalled) == len(running):
            hung += stalled
        if not hung:
            return
        rank = hung[0]
        raise LostRankError(
            f"{rank.name} has not gone on for {limit:.0f} s (stall_seconds) in {last[rank.number].part}; all ranks are "
            f"ended; the last checkpoint in {self._config.output} is whole: the same command goes on from it"
        )

    def _outcome(self) -> Outcome:
        if self._result is None:
            raise StoppedAtOnceError
        steps = self._result["steps"]
        return Outcome(steps, Path(self._result["checkpoint"]), steps < self._config.steps)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stops_asked += 1
        if self._stops_asked == 1:
            for rank in self._ranks[: self._config.topology.drafters]:
                with suppress(ProcessLookupError):
                    rank.process.send_signal(signal.SIGTERM)


class StoppedAtOnceError(Exception):
    """The run was ended before it could save: before its first step, or by a second signal."""
