"""The file by which a worker shows that it is alive, and the check of it, which runs every few seconds."""

import time
from collections.abc import Sequence
from pathlib import Path

from services.errors import UserError
from services.queue_names import Stage
from services.settings import Addresses

STALE_AFTER = 60


def heartbeat_file(stage: Stage, addresses: Addresses) -> Path:
    return addresses.heartbeat.with_name(f"{addresses.heartbeat.name}-{stage}")


def check_heartbeats(stages: Sequence[Stage], addresses: Addresses) -> None:
    """Raises UserError when a worker of one of the queues has shown no sign of life for a minute."""
    for stage in stages:
        path = heartbeat_file(stage, addresses)
        try:
            age = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            raise UserError(f"worker of queue {stage}: no heartbeat at {path}; it has not started here") from None
        if age > STALE_AFTER:
            raise UserError(f"worker of queue {stage}: last heartbeat {age:.0f} s ago; it hangs, restart it")
