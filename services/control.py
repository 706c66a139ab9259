"""Whether a run's generating goes on: paused by its operator or by its budget. A file, so that it outlives Redis."""

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta

from services.runs import Run, read_json, replace_json


@dataclass(frozen=True)
class Control:
    """`paused` is why, or None; the budgets end in a pause: answer tokens in all, and a time in ISO 8601."""

    paused: str | None = None
    max_tokens: int | None = None
    until: str | None = None

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


def set_budget(run: Run, max_tokens: int | None = None, hours: float | None = None) -> None:
    """Lift a pause and replace the budgets: answer tokens of the run in all, and hours from now; None: no end."""
    until = None if hours is None else (datetime.now(UTC) + timedelta(hours=hours)).isoformat(timespec="seconds")
    replace_json(run.control, asdict(Control(None, max_tokens, until)))
