"""What the workers of a run are doing now: written to Redis by each every few seconds, gone with it.

Redis itself lets go of what a worker has not written anew, so that the clocks of the workers' hosts need not agree.
"""

import json
from typing import Any

from redis import Redis

STALE_SECONDS = 20
SERVER_STATES = ("ready", "refused", "left out")


def publish_live(connection: Redis, run: str, worker: str, content: dict[str, Any]) -> None:
    names = _names(run)
    with connection.pipeline() as pipeline:
        pipeline.set(_key(run, worker), json.dumps(content), ex=STALE_SECONDS)
        pipeline.sadd(names, worker)
        pipeline.expire(names, STALE_SECONDS)
        pipeline.execute()


def read_live(connection: Redis, run: str) -> list[dict[str, Any]]:
    """What each live worker of the run wrote last."""
    names: set[bytes] = connection.smembers(_names(run))  # type: ignore[assignment]
    if not names:
        return []
    written: list[bytes | None] = connection.mget([_key(run, name.decode()) for name in sorted(names)])  # type: ignore[assignment]
    return [json.loads(content) for content in written if content is not None]


def _names(run: str) -> str:
    return f"dflash:live-workers:{run}"


def _key(run: str, worker: str) -> str:
    return f"dflash:live:{run}:{worker}"
