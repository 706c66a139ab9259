"""Measure a piece of code in a process of its own: wall clock, CPU, peak memory, bytes written."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Measured(NamedTuple):
    """`result` is what the code returned, `memory` the process' peak in MB, `written` its bytes in MB."""

    seconds: float
    cpu: float
    memory: float
    written: float
    result: Any


def measured_here(work: Callable[[], Any]) -> Measured:
    """Run `work` in this process."""
    before, begun = time.process_time(), time.perf_counter()
    written = _written()
    result = work()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - before
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return Measured(seconds, cpu, memory, (_written() - written) / 1e6, result)


def measured_apart(python: Path | str, module: str, arguments: Sequence[object]) -> Measured:
    """Run `python -m module arguments` on one core's worth of threads; it prints a `Measured` as its last line."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "ARROW_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", module, *map(str, arguments)]
    finished = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(*json.loads(finished.stdout.splitlines()[-1]))


def tell(measured: Measured) -> None:
    """Print what `measured_apart` reads."""
    sys.stdout.write(json.dumps(measured) + "\n")


def drop_from_cache(files: Sequence[Path]) -> None:
    """Make the next read of these files come from the disk."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _written() -> int:
    """Bytes that this process has handed to the file system."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])
