"""Runs of written prompts for servers that answer anything, and ranks that train without a trainer."""

import math
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile

from services.chunks import plan_chunks
from services.files import publish_json
from services.records import Prompt, write_prompts
from services.runs import Run, create_run
from services.settings import Settings, check_settings
from services.target import tokenizer_fingerprint

VOCABULARY = 2000
# The fake server answers a prompt that begins with the one with nothing, and refuses one that begins with the other.
EMPTY, REFUSED = 499, 998
DOMAINS = {"code-questions": "code", "math-questions": "math"}
PARTS = {
    "data_wait": 0.05,
    "target_forward": 0.4,
    "transfer": 0.02,
    "gradient": 0.5,
    "optimizer": 0.03,
}


def make_target(folder: Path) -> Path:
    """What is read of a target's files, and no model."""
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"vocab_size": {VOCABULARY}}}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_run(runs: Path, name: str, target: Path, prompts: int, bad: bool = False, chunk_size: int = 20) -> Run:
    """A run whose prompts are prepared and cut into chunks; of a `bad` one, every prompt is refused or not answered."""
    run = create_run(runs, name, _settings(target, chunk_size))
    total = 0
    for number, source in enumerate(DOMAINS):
        count = prompts // len(DOMAINS)
        firsts = [(EMPTY, REFUSED)[row % 2] if bad else 3 + row % 400 for row in range(count)]
        ids = [[first, 3 + row % 90, 3 + row // 90 % 90, 3 + number] for row, first in enumerate(firsts)]
        run.prompts(source).parent.mkdir(parents=True, exist_ok=True)
        rows = [Prompt(f"{source}-{row}", source, "[]", None, of_row) for row, of_row in enumerate(ids)]
        write_prompts(run.prompts(source), rows)
        total += count
    prepared = {"tokenizer": tokenizer_fingerprint(target), "template": "written", "vocabulary_size": VOCABULARY}
    publish_json(run.prepared, prepared)
    plan_chunks(run, _settings(target, chunk_size))
    return run


def _settings(target: Path, chunk_size: int) -> Settings:
    sources = [
        {"name": name, "files": ["none"], "adapter": "turns", "column": "c", "domain": domain, "quota": 1}
        for name, domain in DOMAINS.items()
    ]
    generate = {"max_new_tokens": 512, "concurrency": 10, "chunk_size": chunk_size, "asked_again": 0, "attempts": 2}
    content: dict[str, Any] = {
        "target": {"path": str(target), "served_name": "target", "context_length": 2048},
        "sources": sources,
        "render": {"max_prompt_tokens": 256},
        # A hang of the test's is to be seen by Prometheus, and not to be ended by the producers.
        "generate": generate | {"stall_timeout": 3600},
        "assemble": {"max_length": 1024},
        "train": {"steps": 1000, "draft": {"mask_token_id": 3}},
    }
    return check_settings(content, where="the test's configuration")


class WrittenRank:
    """A rank's metrics as the trainer writes them; `trained` writes another log interval."""

    def __init__(self, run: Run, rank: int, role: str, cards: bool = False) -> None:
        self._path = run.rank_metrics / f"rank-{rank}.prom"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._labels = {"rank": str(rank), "role": role}
        self._registry = CollectorRegistry()
        self._series: dict[str, Gauge | Counter] = {}
        self.step = 0
        self.finite = True
        self.acceptance = 2.0
        self.saved_at = time.time()
        self.held = 60 * 2**30 if cards else None

    def trained(self, steps: int = 5, seconds: float = 1.0) -> None:
        """So many more steps, of so many seconds together; 0 steps: written again as it stands."""
        self.step += steps
        for name, amount in {"steps": 1, "tokens": 640, "draft_rows": 256, "samples": 8}.items():
            self._count(name, amount * steps)
        self._count("step_downs", 0, setting="token_budget")
        for part, share in PARTS.items():
            self._count("part_seconds", share * seconds if steps else 0, part=part)
        loss = 2 + 8 * math.exp(-self.step / 200) if self.finite else math.nan
        accuracies = [0.9 - 0.6 * math.exp(-self.step / 300) - 0.1 * position for position in range(3)]
        for name, value in {
            "steps_planned": 1000,
            "epoch": self.step // 100,
            "loss": loss,
            "loss_finite": float(self.finite),
            "learning_rate": 6e-4 * (1 - self.step / 2000),
            "acceptance_estimate": 1 + sum(accuracies),
            "acceptance_step": self.step,
            "checkpoint_timestamp_seconds": self.saved_at,
        }.items():
            self._set(name, value)
        if steps:
            self._set("last_step_timestamp_seconds", time.time())
        for position, accuracy in enumerate(accuracies, start=1):
            self._set("accuracy", accuracy, position=str(position))
        for number, source in enumerate(("all", *DOMAINS)):
            self._set("acceptance_length", self.acceptance + 0.1 * number, source=source)
        self._set("memory_bytes", 3 * 2**30, kind="resident")
        if self.held is not None:
            kinds = {"context": 0.5, "allocated": 0.8, "reserved": 1.0, "peak": 1.05}
            for kind, share in kinds.items():
                self._set("memory_bytes", 600 * 2**20 if kind == "context" else share * self.held, kind=kind)
            self._set("memory_bytes", 64 * 2**30, kind="planned")
        write_to_textfile(str(self._path), self._registry)

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._get(Gauge, name, labels).set(value)

    def _count(self, name: str, amount: float, **labels: str) -> None:
        self._get(Counter, name, labels).inc(amount)

    def _get(self, kind: type[Gauge] | type[Counter], name: str, labels: dict[str, str]) -> Any:
        if name not in self._series:
            names = [*self._labels, *labels]
            self._series[name] = kind(f"dflash_training_{name}", "Written.", names, registry=self._registry)
        return self._series[name].labels(**self._labels, **labels)
