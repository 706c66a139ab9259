"""Draws the memory dashboard as a machine with cards shows it, where there is no card.

    python -m tests.monitoring.written_cards PICTURES [--minutes N]

The stack is that of the tests, with cards and ranks that are written and the real intervals.
"""

import argparse
import tempfile
import time
from pathlib import Path

import matplotlib as mpl

from monitoring.grafana.write import DASHBOARDS
from tests.monitoring.bring_up import bring_up
from tests.monitoring.pictures import draw

DASHBOARD = "dflash-memory"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the memory dashboard over written cards.")
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--minutes", type=float, default=4)
    arguments = parser.parse_args()
    mpl.use("Agg")
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    (dashboard,) = (dashboard for dashboard in DASHBOARDS if dashboard.uid == DASHBOARD)
    with tempfile.TemporaryDirectory() as folder, bring_up(Path(folder), fast=False) as live:
        live.stack.serve_cards()
        live.ranks["trained"].held = 60 * 2**30
        time.sleep(arguments.minutes * 60)
        draw(dashboard, live.prometheus, arguments.minutes, arguments.pictures / f"{DASHBOARD}.png")


if __name__ == "__main__":
    main()
