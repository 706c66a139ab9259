"""Watches a real run with Prometheus, draws the dashboards while it generates and trains, and lists what they show.

    python -m tests.monitoring.watched_run PICTURES TABLE

The run is the demo's with more prompts and steps: the real SGLang, target, workers and trainer. TABLE becomes a
Markdown file of every panel with the values that it showed at three moments. Exits with 1 when a panel that should
showed nothing at any.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import yaml

from monitoring.grafana.write import DASHBOARDS
from services.environments import interpreter
from services.ledger import count_generated, total
from services.runs import Run
from services.stack.demo.processes import free_port
from tests.monitoring.live import ROOT, LiveStack, answers, live_stack, wait_until
from tests.monitoring.pictures import draw
from tests.monitoring.prometheus import Prometheus
from tests.monitoring.written_cards import DASHBOARD as WITH_CARDS

RUN = "watched"
PROMPTS_A_SOURCE, ANSWER_TOKENS, STEPS = 48, 48, 120
SECONDS = 1800.0
WHILE_GENERATING = ("dflash-generation",)
# Panels that such a run leaves empty, and why.
EMPTY = {
    "dflash 2 Generation: Failures by reason": "nothing failed",
    "dflash 5 Memory: Measured of idle processes": "`dflash-stack budget measure` measures containers",
}
Shown = dict[str, str]


def settings() -> dict[str, Any]:
    """The demo's, long enough to be looked at, and measuring acceptance while it trains."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "config" / "demo.yaml").read_text(encoding="utf-8"))
    for source in content["sources"]:
        source["quota"] = PROMPTS_A_SOURCE
    content["generate"]["max_new_tokens"] = ANSWER_TOKENS
    longest = content["render"]["max_prompt_tokens"] + ANSWER_TOKENS
    content["assemble"]["max_length"] = content["train"]["max_length"] = longest
    content["train"] |= {"steps": STEPS, "log_every": 5, "acceptance": {"every": 40, "max_new_tokens": 20}}
    return content


def watch(stack: LiveStack, pictures: Path) -> tuple[Shown, Shown, Shown]:
    """Bring the stack up and run every stage; returns what each panel showed while generating, training, at the end."""
    config = stack.folder / "config.yaml"
    content = settings()
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    stack.start_redis()
    server = _start_sglang(stack, content["target"])
    stack.start_exporters(ROOT / "images/versions.toml", ROOT / "operations/releases.jsonl")
    stack.start_workers([server])
    stack.start_worker("preparer", "tokenizer", "prepare")
    prometheus = stack.start_prometheus(fast=False)
    began = time.monotonic()

    def look(*uids: str) -> Shown:
        minutes = (time.monotonic() - began) / 60
        return _look(prometheus, minutes, pictures, uids)

    run = Run(stack.runs / RUN)
    prompts = PROMPTS_A_SOURCE * len(content["sources"])
    _stage(stack, "prepare", RUN, "--config", str(config))
    submitted = _begin(stack, "submit", RUN)
    _wait_while(submitted, lambda: total(count_generated(run).values()).completed > prompts * 0.7)
    generating = look(*WHILE_GENERATING)
    _end(submitted, "submit")
    agreement = [interpreter("tokenizer"), "-m", "services.tokenizer.agreement", RUN]
    subprocess.run(agreement, cwd=ROOT, env=stack.environment, check=True)
    _stage(stack, "merge", RUN)
    training = _begin(stack, "train", RUN)
    _wait_while(training, lambda: _steps_made(prometheus) > STEPS * 0.8)
    trained = look(*(board.uid for board in DASHBOARDS if board.uid not in (*WHILE_GENERATING, WITH_CARDS)))
    _end(training, "train")
    _stage(stack, "evaluate", RUN)
    wait_until(lambda: prometheus.value("count(dflash_evaluation_acceptance_length)") is not None, 60, "not scraped")
    return generating, trained, look()


def table(moments: tuple[Shown, ...]) -> str:
    """The Markdown page."""
    rows = []
    for panel in moments[0]:
        values = [shown[panel] for shown in moments]
        if panel in EMPTY and set(values) == {"empty"}:
            values[0] = f"empty: {EMPTY[panel]}"
        if len(set(values)) == 1 or values[0].startswith("empty: "):
            values[1:] = ["the same"] * (len(values) - 1)
        rows.append(f"| {panel} | " + " | ".join(values) + " |")
    return "\n".join(
        (
            "# What the panels showed during a real run",
            "",
            "`make pictures` on two cores without a GPU: SGLang and SmolLM2-135M-Instruct, four sources of up to "
            f"{PROMPTS_A_SOURCE} prompts, {STEPS} steps of training. At most six series of a panel are named.",
            "",
            "| dashboard: panel | while generating | while training | at the end |",
            "|---|---|---|---|",
            *rows,
            "",
        )
    )


def _start_sglang(stack: LiveStack, target: dict[str, Any]) -> str:
    port = free_port()
    options = ["--model", target["path"], "--served-model-name", target["served_name"], "--port", str(port)]
    stack.start("sglang", [interpreter("sglang"), ROOT / "images/sglang/cpu/serve.py", *options])
    wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 400, "SGLang is not healthy")
    stack.scrape("sglang", port)
    return f"http://127.0.0.1:{port}"


def _begin(stack: LiveStack, *command: str) -> subprocess.Popen[bytes]:
    started = [str(interpreter("stack")), "-m", "services.stack", *command]
    return subprocess.Popen(started, cwd=ROOT, env={**os.environ, **stack.environment})


def _end(process: subprocess.Popen[bytes], what: str) -> None:
    if process.wait(SECONDS) != 0:
        raise SystemExit(f"{what} failed")


def _stage(stack: LiveStack, *command: str) -> None:
    _end(_begin(stack, *command), command[0])


def _wait_while(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    wait_until(lambda: process.poll() is not None or condition(), SECONDS, "the run does not go on")
    if process.poll() is not None:
        raise SystemExit("the stage ended before it was looked at")


def _steps_made(prometheus: Prometheus) -> float:
    return prometheus.value(f'max(dflash_training_steps_total{{run="{RUN}"}})') or 0.0


def _look(prometheus: Prometheus, minutes: float, pictures: Path, drawn: tuple[str, ...]) -> Shown:
    told: Shown = {}
    with tempfile.TemporaryDirectory() as elsewhere:
        for dashboard in DASHBOARDS:
            folder = pictures if dashboard.uid in drawn else Path(elsewhere)
            told |= draw(dashboard, prometheus, minutes, folder / f"{dashboard.uid}.png")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description="Watch a real run, and draw the dashboards.")
    parser.add_argument("pictures", type=Path)
    parser.add_argument("table", type=Path)
    arguments = parser.parse_args()
    mpl.use("Agg")
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, live_stack(Path(folder)) as stack:
        moments = watch(stack, arguments.pictures)
    arguments.table.write_text(table(moments), encoding="utf-8")
    silent = [panel for panel in moments[0] if panel not in EMPTY and {shown[panel] for shown in moments} == {"empty"}]
    for panel in silent:
        sys.stderr.write(f"showed nothing: {panel}\n")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
