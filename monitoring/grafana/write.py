"""Writes dashboards/*.json from the modules beside this file: python -m monitoring.grafana.write"""

import json
from pathlib import Path

from monitoring.grafana import data, generation, health, memory, overview, training
from monitoring.grafana.model import to_json

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = tuple(module.DASHBOARD for module in (overview, generation, data, training, memory, health))


def texts() -> dict[str, str]:
    """The content of each file by its name."""
    return {
        f"{dashboard.uid}.json": json.dumps(to_json(dashboard), indent=1, ensure_ascii=False) + "\n"
        for dashboard in DASHBOARDS
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
