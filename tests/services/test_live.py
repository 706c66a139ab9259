"""What live workers tell of themselves is seen for as long as Redis' own clock says that they live."""

import time

import pytest
from redis import Redis

from services import live
from services.live import publish_live, read_live


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_a_worker_on_a_host_with_another_clock_is_seen(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    here = time.time
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(time, "time", lambda: here() + ahead)
        publish_live(redis, "r", "one", {"chunks": 1})
    assert [worker["chunks"] for worker in read_live(redis, "r")] == [1]


def test_of_a_dead_worker_nothing_stays_beside_the_living(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STALE_SECONDS", 1)
    content = {"chunks": 1, "servers": {f"http://{number}": {"in_flight": 7} for number in range(100)}}
    for number in range(50):
        publish_live(redis, "r", f"dead-{number}", content)
    for _ in range(4):
        time.sleep(0.4)
        publish_live(redis, "r", "alive", content)
    assert read_live(redis, "r") == [content]
    kept = [len(redis.dump(key) or b"") for key in redis.scan_iter()]
    assert sum(kept) < 5 * len(redis.dump("dflash:live:r:alive") or b"")
    assert read_live(redis, "other") == []
