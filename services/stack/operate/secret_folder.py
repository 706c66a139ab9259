"""Makes the folder of secrets that the containers mount."""

import secrets
from pathlib import Path

NAMES = ("redis_password", "hf_token")


def make_secrets(folder: Path) -> list[str]:
    """Make what is missing: a random password for Redis, and an empty token of the hub. Returns the names made.

    The folder is for its owner; the files in it are for all, since the containers' users are others.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = []
    for name in NAMES:
        path = folder / name
        if not path.exists():
            path.write_text(secrets.token_hex(24) if name == "redis_password" else "", encoding="utf-8")
            path.chmod(0o444)
            made.append(name)
    return made
