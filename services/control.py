"""Whether a run's generating goes on: paused by its operator or by its budget. A file, so that it outlives Redis."""

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta

from services.chunks import Chunk, choose
from services.files import read_json, replace_json
from services.runs import Run


@dataclass(frozen=True)
class Control:
    """What was submitted of a run, and whether it goes on.

    `paused` is why, or None. The budgets end in a pause: answer tokens of the run in all, and a time in ISO 8601.
    `sources` and `limit` (prompts) narrow what is submitted; None: all.
    """

    paused: str | None = None
    max_tokens: int | None = None
    until: str | None = None
    sources: list[str] | None = None
    limit: int | None = None

    def spent(self, output_tokens: int) -> str | None:
        """Which budget is used up, or None."""
        if self.max_tokens is not None and output_tokens >= self.max_tokens:
            return f"its budget of {self.max_tokens:,} tokens is used up"
        if self.until is not None and datetime.now(UTC) >= datetime.fromisoformat(self.until):
            return f"its time was up at {self.until}"
        return None


def read_control(run: Run) -> Control:
    try:
        return Control(**read_json(run.control))
    except FileNotFoundError:
        return Control()


def pause(run: Run, reason: str) -> None:
    """Requests in flight are finished and kept; no new ones are sent."""
    replace_json(run.control, asdict(replace(read_control(run), paused=reason)))


def go_on(run: Run, max_tokens: int | None = None, hours: float | None = None) -> None:
    """Lift a pause, and replace the budgets: answer tokens of the run in all, and hours from now; None: no end."""
    until = None if hours is None else (datetime.now(UTC) + timedelta(hours=hours)).isoformat(timespec="seconds")
    replace_json(run.control, asdict(replace(read_control(run), paused=None, max_tokens=max_tokens, until=until)))


def narrow(run: Run, sources: list[str] | None, limit: int | None) -> None:
    """Submit these sources and about so many prompts of the run; None: all."""
    replace_json(run.control, asdict(replace(read_control(run), sources=sources, limit=limit)))


def submitted_chunks(run: Run) -> list[Chunk]:
    """The chunks of the run that were submitted."""
    control = read_control(run)
    return choose(run, control.sources, control.limit)
