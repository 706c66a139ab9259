"""What preparing prompts costs: rows a second and peak memory, over synthetic rows of all six shapes.

    make bench-prompts                       500,000 rows on two processes, without near duplicates and with them
    make bench-prompts ARGUMENTS=--tenth     the table for the six sources at a tenth of their real size

The tokenizer is the demo's (`make materials`).
"""

# ruff: noqa: T201  (a command: what it prints is for the one who called it)
import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from services.chat import load_tokenizer
from services.files import read_json
from services.logs import configure_logs
from services.prompts.prepare import prepare_run
from services.runs import create_run
from services.settings import check_settings
from services.stack.prepared import print_prepared
from tests.benchmarks.prompt_sources import ROWS, write_sources

ROOT = Path(__file__).parents[2]
PRODUCTION = ROOT / "config" / "qwen3.6-27b.yaml"
TARGET = Path(os.environ.get("DFLASH_TEST_TARGET", ROOT / "var" / "models" / "SmolLM2-135M-Instruct"))


def settings(paths: dict[str, Path], share: float, near: bool) -> dict[str, Any]:
    """The production configuration, over local files, with a share of its quotas."""
    content: dict[str, Any] = yaml.safe_load(PRODUCTION.read_text())
    content["target"] |= {"path": str(TARGET), "served_name": "target"}
    content["merge"] = {}
    content["sources"] = [source for source in content["sources"] if source["name"] in paths]
    for source in content["sources"]:
        for key in ("dataset", "revision", "data_files"):
            source.pop(key)
        source["files"] = [str(paths[source["name"]])]
        for key in ("quota", "held_out"):
            source[key] = max(round(source[key] * share), 1)
    evaluation = {"name": "evaluation", "files": [str(next(iter(paths.values())).parent / "evaluation.jsonl")]}
    content["prepare"]["decontaminate"]["against"] = [{**evaluation, "adapter": "question", "column": "question"}]
    if not near:
        content["prepare"]["deduplicate"] = {"near": None}
    return content


def measure(content: dict[str, Any], runs: Path, name: str, processes: int) -> dict[str, Any]:
    """Prepare one run in a process of its own, so that its peak memory is its own."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_prepare, args=(content, runs, name, processes, sending))
    child.start()
    sending.close()
    try:
        measured: dict[str, Any] = receiving.recv()
    except EOFError:
        sys.exit(f"{name}: it failed, see above")
    child.join()
    return measured


def _prepare(content: dict[str, Any], runs: Path, name: str, processes: int, sending: Any) -> None:
    configure_logs()
    checked = check_settings(content, "benchmark")
    tokenizer = load_tokenizer(checked.target.path)
    run = create_run(runs, name, checked)
    began = time.monotonic()
    prepare_run(run, checked, tokenizer, processes)
    seconds = time.monotonic() - began
    # The processes have ended, so their time and the memory of the largest are known.
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    sending.send(
        {
            "seconds": seconds,
            "cpu_seconds": own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime,
            "own_mb": own.ru_maxrss / 1024,
            "largest_mb": children.ru_maxrss / 1024,
            "prepared": str(run.prepared),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure preparing prompts.")
    parser.add_argument("--rows", type=int, default=500_000, help="of all six sources together")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tenth", action="store_true", help="a tenth of the real rows and quotas, and the table")
    parser.add_argument("--folder", type=Path, help="keep the synthetic files and runs there")
    arguments = parser.parse_args()
    sources = {name: count for name, count in ROWS.items() if name != "agentinstruct"}
    share = 0.1 if arguments.tenth else arguments.rows / sum(sources.values())
    rows = {name: max(round(count * share), 1) for name, count in sources.items()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        paths = write_sources(folder / f"rows-{sum(rows.values())}", rows)
        for near in (True,) if arguments.tenth else (False, True):
            name = f"{'near' if near else 'exact'}-{os.getpid()}"
            measured = measure(settings(paths, share, near), folder / "runs", name, arguments.processes)
            prepared = read_json(Path(measured.pop("prepared")))
            read = prepared["total"]["read"]
            print(
                f"{'with' if near else 'without'} near duplicates: {read:,} rows in {measured['seconds']:.0f} s, "
                f"{read / measured['seconds']:,.0f} rows/s on {arguments.processes} processes "
                f"({measured['cpu_seconds']:.0f} s of CPU, start included), "
                f"{prepared['total']['kept']:,} prompts; peak memory {measured['own_mb']:,.0f} MB, and at most "
                f"{measured['largest_mb']:,.0f} MB in each process (shared pages counted in both)"
            )
            if arguments.tenth:
                print_prepared(prepared, Console(width=130, highlight=False))
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
