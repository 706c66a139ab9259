"""Secrets come as files, and one that nobody chose is refused: a placeholder protects nothing."""

import re
from pathlib import Path

from services.errors import UserError

SHORTEST = 12
PLACEHOLDER = re.compile(r"change[-_ ]?me|replace[-_ ]?me|your[-_ ]|example|placeholder|password|secret|^<|12345")
MAKE_ONE = "make one: openssl rand -hex 24"


def read_secret(path: Path) -> str:
    """The secret that a file holds.

    Raises:
        UserError: there is no such file, or what it holds is no secret.
    """
    try:
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"secret {path}: {reason}; {MAKE_ONE} > {path}") from error
    check_secret(value, str(path))
    return value


def check_secret(value: str, where: str) -> None:
    """Raises UserError when `value` is empty, short, a placeholder, or holds what would have to be quoted somewhere."""
    if not value:
        raise UserError(f"secret {where}: it is empty; {MAKE_ONE}")
    if PLACEHOLDER.search(value.lower()):
        raise UserError(f"secret {where}: it is a placeholder; {MAKE_ONE}")
    if len(value) < SHORTEST:
        raise UserError(f"secret {where}: it is shorter than {SHORTEST} characters; {MAKE_ONE}")
    if not re.fullmatch(r"[A-Za-z0-9_.~+/=-]+", value):
        raise UserError(f"secret {where}: only letters, digits and _.~+/=- pass everywhere unquoted; {MAKE_ONE}")
