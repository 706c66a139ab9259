"""make bench-data: text to samples, ids to samples, and the merge, each paired in one run with the peers' own code.

The ways of a pair take turns; a row shows the median of the rounds. CPU seconds are those of the work alone, without
start and imports. `--quick` is a small try-out.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from services.dataset_folder import open_dataset, read_batches, write_shards, write_state
from services.records import SAMPLE_SCHEMA
from services.runs import Run
from tests.benchmarks.measured import ROOT, Measured, drop_from_cache, measured_apart
from tests.benchmarks.synthetic import make_corpus, make_run

FOLDER = ROOT / "var" / "benchmarks"
TOKENIZER = ROOT / "var" / "tokenizers" / "qwen3_6"
DATA = ROOT / "var" / "demo" / "data"
PEERS = ROOT / "var" / "peers"
PEER = ROOT / "tests" / "benchmarks" / "peers" / "measure_peer.py"
BASE_ROWS, NEW_ROWS = 902_087, 192_995
TEXT_COLUMNS = ("turns", "way", "source tokens", "tok/s", "CPU x reference", "tokens out x in")
TOKENS_A_ROW = 64
# The story's mean prompt and completion.
PROMPT_TOKENS, GENERATED_TOKENS = 500, 2712


def bench_text(console: Console, conversations: int, rounds: int) -> list[dict[str, Any]]:
    """Conversations of one turn and of 32. The peers get fewer of the long ones, and are compared by source token."""
    results = []
    table = _table(console, "text to samples (Qwen3.6)", *TEXT_COLUMNS)
    for turns, count, of_peers in ((1, conversations, conversations), (32, conversations // 8, conversations // 256)):
        ours, peers = (FOLDER / f"conversations-{turns}-{number}.jsonl" for number in (count, of_peers))
        for path, number in ((ours, count), (peers, of_peers)):
            _write_conversations(path, number, turns)
        source = {path: _ours("reference", path)["tokens"] for path in {ours, peers}}
        ways: dict[str, tuple[Path, Callable[[Path], dict[str, Any]]]] = {
            "render + encode": (ours, lambda path: _ours("reference", path)),
            "ours": (ours, lambda path: _ours("ours", path)),
            "speculators 0.9.0": (peers, lambda path: _peer("speculators", "speculators", path)),
            "SpecForge 0.2.0": (peers, lambda path: _peer("specforge", "specforge", path)),
        }
        made_rounds: list[dict[str, dict[str, Any]]] = [{} for _ in range(rounds)]
        for number, name in _in_turn(console, f"{turns}-turn conversations", rounds, ways):
            path, work = ways[name]
            made_rounds[number][name] = work(path)
        for name, (path, _) in ways.items():
            a_token = [one[name]["cpu"] / source[path] for one in made_rounds]
            reference = [one["render + encode"]["cpu"] / source[ours] for one in made_rounds]
            ratio = statistics.median(way / base for way, base in zip(a_token, reference, strict=True))
            rate, made = 1 / statistics.median(a_token), made_rounds[0][name]["tokens"] / source[path]
            results.append({"turns": turns, "way": name, "tokens_per_second": rate, "ratio": ratio, "made": made})
            table.add_row(f"{turns}", name, f"{source[path]:,}", f"{rate:,.0f}", f"{ratio:.2f}", f"{made:.2f}")
    console.print(table)
    return results


def bench_ids(console: Console, rows: int, rounds: int) -> list[dict[str, Any]]:
    output = _empty(FOLDER / "ids")
    path = FOLDER / "ids.jsonl"
    length = PROMPT_TOKENS + GENERATED_TOKENS
    row = {"input_ids": [7] * length, "loss_mask": [0] * PROMPT_TOKENS + [1] * GENERATED_TOKENS}
    path.write_text((json.dumps(row) + "\n") * min(rows, 512))
    rates: dict[str, list[float]] = {"ours": [], "speculators 0.9.0": []}
    for _ in range(rounds):
        arguments = (rows, PROMPT_TOKENS, GENERATED_TOKENS, output)
        ours = measured_apart(sys.executable, "tests.benchmarks.measure_ids", arguments)
        rates["ours"].append(ours.result / ours.cpu)
        peer = _peer("speculators", "speculators_ids", path)
        rates["speculators 0.9.0"].append(peer["tokens"] / peer["cpu"])
    shutil.rmtree(output)
    table = _table(console, "ids to samples, a core", "way", "tok/s", "")
    notes = {"ours": "masked, counted and written as Arrow", "speculators 0.9.0": "passed through, not written"}
    for name, of_way in rates.items():
        table.add_row(name, f"{statistics.median(of_way):,.0f}", notes[name])
    console.print(table)
    return [{"way": name, "tokens_per_second": statistics.median(of_way)} for name, of_way in rates.items()]


def bench_merge(console: Console, base_rows: int, new_rows: int, rounds: int) -> list[dict[str, Any]]:
    corpus = FOLDER / f"corpus-{base_rows}"
    make_corpus(corpus, base_rows, TOKENS_A_ROW)
    run = make_run(FOLDER / f"runs-{new_rows}", new_rows, TOKENS_A_ROW)
    _as_dataset(run)
    output = FOLDER / "merged"
    before = _listing(corpus)
    ways = ("build the index, merge", "merge", "merge, verified", "concatenate + save")
    measured: dict[str, list[Measured]] = {way: [] for way in ways}
    for _, way in _in_turn(console, "merge", rounds, ways):
        shutil.rmtree(output, ignore_errors=True)
        if way == "build the index, merge":
            shutil.rmtree(run.root.parent / ".indexes", ignore_errors=True)
        name = {"concatenate + save": "concatenate", "merge, verified": "verified"}.get(way, "ours")
        measured[way].append(
            measured_apart(sys.executable, "tests.benchmarks.measure_merge", (name, corpus, run.root, output))
        )
    assert _listing(corpus) == before, "the base was written to"
    title = f"merge of {base_rows:,} + {new_rows:,} samples of about {TOKENS_A_ROW} tokens"
    table = _table(console, title, "way", "s", "CPU s", "peak MB", "written MB")
    results = []
    for way, of_way in measured.items():
        middle = sorted(of_way, key=lambda one: one.seconds)[len(of_way) // 2]
        table.add_row(way, *(f"{value:,.2f}" for value in middle[:4]))
        results.append({"way": way, **dict(zip(("seconds", "cpu", "memory", "written"), middle[:4], strict=True))})
    console.print(table)
    samples = measured["merge, verified"][0].result["samples"]
    console.print(f"samples after the merge: {samples:,}; the base's files are as they were")
    longer = FOLDER / f"corpus-long-{base_rows // 30}"
    make_corpus(longer, base_rows // 30, PROMPT_TOKENS + GENERATED_TOKENS)
    results += bench_read(console, longer, rounds)
    return results


def bench_read(console: Console, corpus: Path, rounds: int) -> list[dict[str, Any]]:
    """The verifying read against `cat`, from the disk and from memory, on samples as long as the story's."""
    shards = open_dataset(corpus).shards
    size = sum(shard.stat().st_size for shard in shards) / 1e6
    table = _table(console, f"reading {size:,.0f} MB", "from", "way", "MB/s", "x cat", "peak MB")
    results = []
    for where in ("disk", "memory"):
        speeds: dict[str, list[float]] = {"cat": [], "verifying read": []}
        memory = 0.0
        for _ in range(rounds):
            for way, of_way in speeds.items():
                if where == "disk":
                    drop_from_cache(shards)
                if way == "cat":
                    of_way.append(size / _seconds_of_cat(shards))
                else:
                    one = measured_apart(sys.executable, "tests.benchmarks.measure_merge", ("read", corpus, "-", "-"))
                    of_way.append(size / one.seconds)
                    memory = one.memory
        cat = statistics.median(speeds["cat"])
        for way, of_way in speeds.items():
            speed = statistics.median(of_way)
            shown = f"{memory:,.0f}" if way != "cat" else ""
            table.add_row(where, way, f"{speed:,.0f}", f"{speed / cat:.2f}", shown)
            results.append({"from": where, "way": way, "megabytes_per_second": speed})
    console.print(table)
    return results


def _seconds_of_cat(shards: list[Path]) -> float:
    timed = "import subprocess, sys, time; t = time.perf_counter(); subprocess.run(['cat', *sys.argv[1:]], "
    timed += "stdout=subprocess.DEVNULL, check=True); print(time.perf_counter() - t)"
    return float(subprocess.check_output([sys.executable, "-c", timed, *map(str, shards)]))


def _ours(way: str, path: Path) -> dict[str, Any]:
    measured = measured_apart(sys.executable, "tests.benchmarks.measure_text", (way, TOKENIZER, path))
    return {"cpu": measured.cpu, **measured.result}


def _peer(environment: str, peer: str, path: Path) -> dict[str, Any]:
    python = PEERS / environment / "bin" / "python"
    command = [python, PEER, peer, TOKENIZER, path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    output = subprocess.check_output([*map(str, command)], text=True, env=environment)
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _write_conversations(path: Path, count: int, turns: int) -> None:
    """Real questions, answered by real code and prose, in a fixed order."""
    questions = [json.loads(line)["prompt"] for line in (DATA / "gsm8k.jsonl").open(encoding="utf-8")]
    answers = [json.loads(line)["prompt"].strip() for line in (DATA / "humaneval.jsonl").open(encoding="utf-8")]
    with path.open("w", encoding="utf-8") as lines:
        for number in range(count):
            messages = []
            for turn in range(turns):
                place = 7 * number + turn
                answer = "\n\n".join(answers[(place + part) % len(answers)] for part in range(3))
                messages.append({"role": "user", "content": questions[place % len(questions)]})
                messages.append({"role": "assistant", "content": answer})
            lines.write(json.dumps({"messages": messages}) + "\n")


def _as_dataset(run: Run) -> None:
    """The run's samples as `datasets` would be given them."""
    folder = run.root / "as_dataset"
    if not folder.exists():
        folder.mkdir()
        import pyarrow as pa

        tables = (
            pa.Table.from_batches([batch])
            for path in sorted(run.samples("").parent.glob("*.arrow"))
            if "provenance" not in path.name
            for batch in read_batches(path)
        )
        write_state(folder, write_shards(folder, SAMPLE_SCHEMA, tables), "new")


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _in_turn(console: Console, what: str, rounds: int, ways: Iterable[str]) -> Iterable[tuple[int, str]]:
    """Every way of every round, the ways in turn, with a progress bar."""
    pairs = [(number, way) for number in range(rounds) for way in ways]
    return track(pairs, description=what, console=console, transient=True)


def _table(console: Console, title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        numeric = column not in ("way", "from", "")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a hundredth of everything")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is measured")
    parser.add_argument("parts", nargs="*", metavar="PART", help="text, ids, merge; all of them by default")
    given = parser.parse_args()
    share = 100 if given.quick else 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    parts = {
        "text": lambda: bench_text(console, 4096 // (16 if given.quick else 1), given.rounds),
        "ids": lambda: bench_ids(console, 128 * max(1, 64 // share), given.rounds),
        "merge": lambda: bench_merge(console, BASE_ROWS // share, NEW_ROWS // share, given.rounds),
    }
    results = {name: parts[name]() for name in given.parts or parts}
    (FOLDER / "data.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
