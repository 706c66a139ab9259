"""Brings the tests' live stack up with the real intervals and draws its dashboards after a while.

python -m tests.monitoring.show FOLDER [--minutes N]
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from services.environments import interpreter
from services.queues import enqueue
from services.runs import Run
from tests.monitoring.bring_up import bring_up
from tests.monitoring.live import ROOT, wait_until


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the dashboards of the tests' live stack.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, bring_up(Path(folder), fast=False) as live:
        began = time.monotonic()
        live.stack.serve_cards()
        live.ranks["trained"].held = 60 * 2**30
        short = Run(live.stack.runs / "short")
        wait_until(lambda: len(list((short.root / "samples").glob("*.json"))) == 2, 300, "not assembled")
        enqueue("merge", live.redis, "merge", "short", job_timeout=60)
        time.sleep(max(0.0, began + arguments.minutes * 60 - time.monotonic()))
        command = [interpreter("stack"), "-m", "tests.monitoring.pictures", live.prometheus.url, arguments.folder]
        options = ["--minutes", str(arguments.minutes), "--values", arguments.folder / "values.txt"]
        subprocess.run([str(part) for part in (*command, *options)], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
