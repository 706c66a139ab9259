"""What the workers of a run are doing now: written to Redis by each every few seconds, gone with it."""

import json
import time
from typing import Any

from redis import Redis

STALE_SECONDS = 20
SERVER_STATES = ("ready", "refused", "left out")


def publish_live(connection: Redis, run: str, worker: str, content: dict[str, Any]) -> None:
    key = _key(run)
    connection.hset(key, worker, json.dumps({"at": time.time(), **content}))
    connection.expire(key, STALE_SECONDS)


def read_live(connection: Redis, run: str) -> list[dict[str, Any]]:
    """What each live worker of the run wrote last."""
    written: dict[bytes, bytes] = connection.hgetall(_key(run))  # type: ignore[assignment]
    contents = [json.loads(content) for content in written.values()]
    return [content for content in contents if time.time() - content["at"] < STALE_SECONDS]


def _key(run: str) -> str:
    return f"dflash:live:{run}"
