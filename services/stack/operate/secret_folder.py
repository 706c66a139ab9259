"""Makes the folder of secrets that the containers mount."""

import json
import secrets
from pathlib import Path

# Who reads them: Redis and the workers, Redis' exporter (in a form of its own), Grafana, and `prepare` for the hub.
REDIS, EXPORTER, GRAFANA, HUB = NAMES = ("redis_password", "redis_exporter.json", "grafana_password", "hf_token")


def make_secrets(folder: Path) -> list[str]:
    """Make what is missing: random passwords, and an empty token of the hub. Returns the names made.

    The folder is for its owner; the files in it are for all, since the containers' users are others.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = [name for name in NAMES if not (folder / name).exists()]
    for name in made:
        path = folder / name
        if name == EXPORTER:
            value = json.dumps({"redis://redis:6379": (folder / REDIS).read_text(encoding="utf-8").strip()})
        else:
            value = "" if name == HUB else secrets.token_hex(24)
        path.write_text(value, encoding="utf-8")
        path.chmod(0o444)
    return made
