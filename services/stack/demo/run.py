"""The demo's sequence: bring up, every stage of a run, report, take down."""

import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from services.chunks import plan_chunks
from services.environments import KNOWN, interpreter
from services.errors import UserError
from services.queue_names import Stage
from services.runs import Run, create_run
from services.settings import Addresses, Settings, load_settings
from services.stack import stages
from services.stack.demo.bring_up import start_redis, start_server, start_worker, wait_for_server
from services.stack.demo.materials import fetch_prompts, make_corpus, make_target
from services.stack.demo.processes import Processes, check_port_is_free, free_port, processes_in
from services.stack.report import collect_report, print_report, write_report
from services.stack.wait import Operator

NEEDED_BYTES = 2_000_000_000
# Who interrupts the demo does not want to wait for answers in flight; the next run asks for them again.
WORKER_GRACE = 2.0

# One process a queue, except for generating, which is shown with two workers.
WORKERS: tuple[tuple[str, str, Stage], ...] = (
    ("worker-prepare", "tokenizer", "prepare"),
    ("worker-generate-1", "producer", "generate"),
    ("worker-generate-2", "producer", "generate"),
    ("worker-assemble", "tokenizer", "assemble"),
    ("worker-merge", "tokenizer", "merge"),
    ("worker-train", "trainer", "train"),
)


def run_demo(folder: Path, config: Path, port: int, console: Console) -> None:
    """Run the main job in `folder`; an unfinished run there is taken up where it stopped.

    Raises:
        UserError: something that the user has to put right; every process is ended by then.
    """
    began = time.monotonic()
    settings = load_settings(config)
    _check_machine(folder)
    with processes_in(folder) as processes:
        check_port_is_free(port, "SGLang server", "--port")
        run = create_run(folder / "runs", _run_name(folder / "runs"), settings)
        console.print(f"run [b]{run.name}[/] in {run.root}; logs in {folder / 'logs'}")
        fetch_prompts(folder / "data", folder / "downloads")
        make_target(settings.target.path, folder / "downloads", processes)
        if not _is_generated(run, settings):
            start_server(settings, port, processes)
        addresses = Addresses(
            redis_url=f"redis://127.0.0.1:{free_port()}/0",
            servers=f"http://127.0.0.1:{port}",
            runs=folder / "runs",
            heartbeat=folder / "logs" / "heartbeat",
            grace=WORKER_GRACE,
        )
        operator = Operator(start_redis(addresses, processes), console, processes.check)
        if settings.merge.base is not None:
            make_corpus(folder / "data" / "corpus.jsonl", settings.target.path, settings.merge.base, processes)
        for name, image, queue in WORKERS:
            start_worker(name, image, queue, addresses, processes)
        _run_stages(run, settings, addresses, operator, processes)
    content = collect_report(run)
    print_report(content, console)
    write_report(content, run, folder)
    console.print(f"report: {folder / 'report.json'}   plots: {folder}/*.png   drafter: {run.export}")
    console.print(f"took {(time.monotonic() - began) / 60:.1f} minutes on {os.cpu_count()} cores")


def _run_stages(run: Run, settings: Settings, addresses: Addresses, operator: Operator, processes: Processes) -> None:
    stages.prepare(run, settings, operator)
    if "sglang" in processes.running:
        wait_for_server(addresses.server_list()[0], processes, operator.console)
    stages.submit(run, settings, operator)
    if "sglang" in processes.running:
        # As in production: the cores that served belong to the trainer from here on.
        processes.stop("sglang")
    stages.merge(run, operator)
    stages.train(run, settings, operator)
    stages.evaluate(run, settings, "before", operator)
    stages.evaluate(run, settings, "after", operator)
    stages.export(run, operator)


def _check_machine(folder: Path) -> None:
    for name in KNOWN:
        if name != "tests" and not interpreter(name).is_file():
            raise UserError(f"environment {name} is missing; `make demo` makes it (python3 services/environments.py)")
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise UserError(
            f"{folder}: {free / 1e9:.1f} GB free, the demo needs {NEEDED_BYTES / 1e9:.0f} GB; "
            "free some, or give another --folder"
        )


def _run_name(runs: Path) -> str:
    """The newest run that is not exported yet, else a new name."""
    unfinished = [record.parent for record in runs.glob("*/run.json") if not (record.parent / "export").is_dir()]
    if unfinished:
        return max(unfinished).name
    return datetime.now(UTC).strftime("demo-%Y%m%d-%H%M%S")


def _is_generated(run: Run, settings: Settings) -> bool:
    if not run.prepared.is_file():
        return False
    return all(run.completions(chunk.chunk).is_file() for chunk in plan_chunks(run, settings))
