"""A merge killed with -9 at moments spread over its whole length: the base untouched, the dataset whole or absent.

make kill-merge        (ARGUMENTS="FOLDER --kills 100")
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from services.runs import Run
from services.tokenizer.merge import verify_dataset
from tests.benchmarks.synthetic import make_corpus, make_run

ROOT = Path(__file__).parents[2]
BASE_ROWS, NEW_ROWS, TOKENS = 20_000, 10_000, 64
MERGE = """
import sys
from pathlib import Path
from services.runs import Run, read_settings
from services.tokenizer.merge import merge_runs
print("begun", flush=True)
run = Run(Path(sys.argv[1]))
merge_runs([run], Path(sys.argv[2]), Path(sys.argv[3]), read_settings(run), verify=False)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="on the disk to try; default: a temporary one")
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sys.stdout.write(kill_again_and_again(Path(folder), options.kills) + "\n")


def kill_again_and_again(folder: Path, kills: int) -> str:
    """Kill a merge at so many moments; returns what came of them. Raises AssertionError at the first damage."""
    base, dataset = folder / "base", folder / "runs" / "datasets" / "merged"
    make_corpus(base, BASE_ROWS, TOKENS)
    run = make_run(folder / "runs", NEW_ROWS, TOKENS)
    before = _state(base)
    seconds = _merge(run, base, dataset)
    whole = _state(dataset)
    came = {"killed before it appeared": 0, "ended before the kill": 0, "killed after it appeared": 0}
    for number in range(kills):
        shutil.rmtree(dataset, ignore_errors=True)
        if number % 2:
            # Then the base's index is built again, and may be what is being written.
            shutil.rmtree(folder / "runs" / ".indexes", ignore_errors=True)
        ended = _merge(run, base, dataset, kill_after=1.2 * seconds * number / kills) is not None
        assert _state(base) == before, "the base was changed"
        if dataset.exists():
            assert _state(dataset) == whole, "the dataset is not whole"
            came["ended before the kill" if ended else "killed after it appeared"] += 1
        else:
            came["killed before it appeared"] += 1
        # Given again, it ends as if nothing had been, and nothing of the killed one is left.
        assert _merge(run, base, dataset) is not None
        assert _state(dataset) == whole
        assert not list(dataset.parent.glob(".*.tmp")), "a killed merge's files are left"
    verify_dataset(dataset)
    listed = ", ".join(f"{count} {what}" for what, count in came.items())
    return (
        f"{kills} kills over {seconds:.2f} s: {listed}; base untouched, dataset whole or absent, nothing left: always"
    )


def _merge(run: Run, base: Path, dataset: Path, kill_after: float | None = None) -> float | None:
    """Seconds that it took from its beginning to its end; None when it was killed before."""
    command = [sys.executable, "-c", MERGE, run.root, base, dataset]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout
        process.stdout.readline()
        begun = time.monotonic()
        try:
            process.wait(kill_after)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None
        assert process.returncode == 0, process.stderr.read().decode() if process.stderr else ""
        return time.monotonic() - begun


def _state(folder: Path) -> dict[str, str]:
    """Every file's content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


if __name__ == "__main__":
    main()
