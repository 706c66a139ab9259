"""How far preparing is, in a file that the command line shows as bars; nothing else depends on it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from services.files import replace_json
from services.runs import Run
from services.settings import SourceSettings

WRITE_SECONDS = 0.5


class Progress:
    """Writes the run's progress file, twice a second at most.

    By source: rows `read`, `scanned` of the files' bytes and `drawn` of the prompts wanted (both from 0 to 1).
    """

    def __init__(self, run: Run, sources: Sequence[SourceSettings]) -> None:
        self._path = run.prepare_progress
        self._wanted = {source.name: source.held_out + source.quota for source in sources}
        self._content: dict[str, dict[str, float]] = {
            source.name: {"read": 0, "scanned": 0.0, "drawn": 0.0, "kept": 0} for source in sources
        }
        self._written = 0.0

    def scanned(self, source: str, read: int, position: float) -> None:
        self._content[source].update(read=read, scanned=position)
        self._write()

    def drawn(self, source: str, taken: int) -> None:
        self._content[source].update(scanned=1.0, drawn=taken / self._wanted[source], kept=taken)
        self._write()

    def finish(self, source: str, account: Mapping[str, Any]) -> None:
        self._content[source].update(read=account["read"], scanned=1.0, drawn=1.0, kept=account["kept"])
        self._write(at_once=True)

    def _write(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._written > WRITE_SECONDS:
            self._written = now
            replace_json(self._path, self._content)
