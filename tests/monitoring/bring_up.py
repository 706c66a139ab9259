"""The live stack of the tests and of the pictures: what runs in it, and which runs are going on."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from redis import Redis

from services.files import publish_json
from services.runs import Run, read_settings
from services.stack.reconcile import reconcile
from tests.monitoring.live import ROOT, LiveStack, live_stack
from tests.monitoring.prometheus import Prometheus
from tests.monitoring.runs import WrittenRank, make_run, make_target


class Live(NamedTuple):
    stack: LiveStack
    prometheus: Prometheus
    redis: Redis
    servers: list[str]
    ranks: dict[str, WrittenRank]
    # Those that make no steps any more.
    stopped: set[WrittenRank]
    versions: Path
    target: Path

    def run(self, name: str) -> Run:
        return Run(self.stack.runs / name)


@contextmanager
def bring_up(folder: Path, fast: bool) -> Iterator[Live]:
    """The stack in an empty folder. With `fast`, Prometheus evaluates the rules in less time than they say."""
    versions, releases = folder / "versions.toml", folder / "releases.jsonl"
    versions.write_text((ROOT / "images/versions.toml").read_text())
    releases.write_text(_release())
    target = make_target(folder / "target")
    with live_stack(folder) as stack:
        stack.start_redis()
        pace = {"tokens_per_second": 20, "mean_tokens": 60, "longest": 200, "slots": 12, "fault_rate": 0.001}
        servers = [stack.start_fake_server(f"server-{number}", **pace) for number in range(2)]
        stack.start_exporters(versions, releases)
        stack.start_workers(servers)
        prometheus = stack.start_prometheus(fast)
        redis = stack.connect()
        for name, prompts, bad in (("short", 40, False), ("bad", 300, True), ("long", 8000, False)):
            run = make_run(stack.runs, name, target, prompts, bad)
            reconcile(run, read_settings(run), redis)
        for name in ("trained", "saved-long-ago", "old"):
            make_run(stack.runs, name, target, 2)
        ranks = {
            "trained": WrittenRank(Run(stack.runs / "trained"), 0, "colocated", cards=False),
            "saved-long-ago": WrittenRank(Run(stack.runs / "saved-long-ago"), 1, "drafter"),
        }
        _write_reports(Run(stack.runs / "old"))
        ended = threading.Event()
        stopped: set[WrittenRank] = set()
        training = threading.Thread(target=_train, args=(ranks, stopped, ended))
        training.start()
        try:
            yield Live(stack, prometheus, redis, servers, ranks, stopped, versions, target)
        finally:
            ended.set()
            training.join()


def _release() -> str:
    budget = {"resident": {"import": 4 * 10**8, "kernels": 6 * 10**8}, "card 0": {"kernels": 6 * 10**8}}
    to = {"image": "sha256:1", "reference": "trainer:v2", "variant": "cu128", "contents": {}}
    entry = {"when": datetime.now(UTC).isoformat(), "event": "done", "action": "swap", "role": "trainer", "to": to}
    return json.dumps({**entry, "budget": budget}) + "\n"


def _write_reports(run: Run) -> None:
    for name, length in (("before", 1.0), ("after", 1.4)):
        report = {"overall": {"acceptance_length": length}, "by_source": {"code": {"acceptance_length": length}}}
        publish_json(run.evaluation(name), report)
    publish_json(run.agreement, {"agree": 97.6})
    assembled = {"samples": 0, "tokens": 0, "supervised_tokens": 0, "truncated": 0, "dropped": {"over_length": 1}}
    publish_json(run.assembled("code-questions-00000"), {"source": "code-questions", **assembled})


def _train(ranks: dict[str, WrittenRank], stopped: set[WrittenRank], ended: threading.Event) -> None:
    while not ended.wait(1.0):
        for rank in list(ranks.values()):
            rank.trained(steps=0 if rank in stopped else 2)
