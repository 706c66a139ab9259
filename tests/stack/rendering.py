"""What Compose makes of the stack's files, by profile, in a form that can be reviewed and compared.

    python tests/stack/rendering.py        writes the snapshots in tests/stack/rendered anew

Needs the compose plugin, and no engine. The stack for cards is rendered for two of them.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = Path(__file__).parent / "rendered"
PROFILES = ("generate", "train", "monitoring", "alerting", "operate")
FILES = ("compose.yaml", "compose.cpu.yaml")
VARIABLES = {
    "MODEL_DIR": "/models/target",
    "SERVED_NAME": "target",
    "DATA_DIR": "/data/prompts",
    "CONFIG_FILE": "/config/run.yaml",
    "VERSION": "1.0",
}


def rendered(file: str, profile: str) -> dict[str, Any]:
    """The services of one profile, and the networks, volumes and secrets, with all defaults put in."""
    sys.path.insert(0, str(ROOT))
    from services.stack.render import render

    text = (ROOT / file).read_text(encoding="utf-8")
    text = render(text, 2) if file == "compose.yaml" else text
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "DOCKER_CONFIG") if name in os.environ}
    command = ["docker", "compose", "--file", "-", "--project-directory", str(ROOT), "--profile", profile, "config"]
    finished = subprocess.run(command, input=text, env=kept | VARIABLES, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise SystemExit(finished.stderr)
    content: dict[str, Any] = yaml.safe_load(finished.stdout.replace(str(ROOT), "."))
    return {name: part for name, part in content.items() if not name.startswith("x-")}


def snapshot(file: str, profile: str) -> Path:
    return SNAPSHOTS / f"{file.removesuffix('.yaml')}-{profile}.yaml"


if __name__ == "__main__":
    for file in FILES:
        for profile in PROFILES:
            snapshot(file, profile).write_text(yaml.safe_dump(rendered(file, profile)), encoding="utf-8")
