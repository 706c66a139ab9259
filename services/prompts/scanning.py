"""The first half of preparing a source: every row is read once, counted, and kept packed if it may become a prompt."""

import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from services.errors import UserError
from services.prompts.accounts import SourceCounts
from services.prompts.adapters import FAULTS
from services.prompts.parallel import Processes
from services.prompts.progress import Progress
from services.prompts.ranking import RECORD, Records
from services.prompts.reading import Block, DamagedFileError, read_blocks
from services.prompts.tasks import ScanTask, Shared, scan
from services.settings import SourceSettings


class Candidates(NamedTuple):
    """Scanned rows, and where each lies in the temporary file: from its offset to the next one's."""

    records: Records
    offsets: Sequence[int]
    packed: IO[bytes]

    def read(self, index: int) -> bytes:
        begin, end = self.offsets[index], self.offsets[index + 1]
        return os.pread(self.packed.fileno(), end - begin, begin)


def scan_source(
    source: SourceSettings,
    files: Sequence[Path],
    max_row_bytes: int,
    packed: IO[bytes],
    pool: Processes[Shared],
    counts: SourceCounts,
    progress: Progress,
) -> Candidates:
    """Scan every row of the source; what may become a prompt is packed into the temporary file."""
    records, offsets = [np.empty(0, RECORD)], array("Q", [0])
    blocks = _blocks(source, files, max_row_bytes, counts)
    tasks = (ScanTask(source, file, block) for file, block in blocks)
    done = dict.fromkeys(files, 0.0)
    for scanned in pool.map(scan, tasks):
        counts.read += scanned.read
        for number, reason in scanned.rejected:
            _refuse_if_told(source, scanned.path, number, reason)
            counts.reject(scanned.path, number, reason)
        records.append(scanned.records)
        for one in scanned.packed:
            packed.write(one)
            offsets.append(offsets[-1] + len(one))
        done[scanned.path] = scanned.position
        progress.scanned(source.name, counts.read, sum(done.values()) / len(done))
    packed.flush()
    return Candidates(np.concatenate(records), offsets, packed)


def _blocks(
    source: SourceSettings, files: Sequence[Path], max_row_bytes: int, counts: SourceCounts
) -> Iterator[tuple[int, Block]]:
    for file, path in enumerate(files):
        try:
            for block in read_blocks(path, source.columns(), max_row_bytes):
                yield file, block
        except DamagedFileError as error:
            if source.on_error == "fail":
                raise
            # The row at which the file breaks off; what follows it in the file was never seen.
            counts.read += 1
            counts.reject(path, error.row, "file_breaks_off")
            counts.damaged.append(str(error))


def _refuse_if_told(source: SourceSettings, path: Path, row: int, reason: str) -> None:
    if source.on_error == "fail" and reason in FAULTS:
        raise UserError(
            f"source {source.name}: {path} row {row}: {reason}; mend the file, or set on_error to reject such rows"
        )
