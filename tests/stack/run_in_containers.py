"""A run that is prepared in a stack with a slow server, so that there is time to disturb it; and its account."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stack_under_test import ROOT, StackUnderTest, make_stack

from services.runs import Run
from services.settings import check_settings, load_settings
from services.stack.report import collect_report

RUN = "r"
QUOTA = 25
SOURCES = 4
CHUNK_SIZE = 5
CHUNKS = SOURCES * QUOTA // CHUNK_SIZE
PROMPTS = SOURCES * QUOTA
COUNT = f"""
from pathlib import Path
from services.ledger import count_generated, total
from services.runs import Run

counts = total(count_generated(Run(Path("/runs/{RUN}"))).values())
print(counts.finished + counts.in_journal)
"""


@contextmanager
def prepared_run(folder: Path, project: str) -> Iterator[StackUnderTest]:
    """The services that generate, and run RUN prepared in them, nothing of it submitted."""
    content = load_settings(ROOT / "config" / "demo.yaml").model_dump(mode="json")
    for source in content["sources"]:
        source.update(quota=QUOTA, held_out=1)
    content["generate"].update(chunk_size=CHUNK_SIZE, max_new_tokens=64, max_repetition=1.0, concurrency=8)
    content["generate"].update(attempts=20, lost_connections=20, tool_calls="keep")
    settings = check_settings(content, where="disturbed run")
    (folder / "data").symlink_to(ROOT / "var" / "demo" / "data")
    files = {"COMPOSE_FILE": "compose.cpu.yaml:tests/stack/fake_server.yaml"}
    stack = make_stack(folder, settings, project, files)
    stack.compose("build", "producer", "tokenizer")
    try:
        stack.up("redis", "sglang", "producer", "tokenizer")
        stack.operator("prepare", RUN, "--config", "/config/config.yaml")
        yield stack
    finally:
        stack.down()


def answered(stack: StackUnderTest) -> int:
    """Prompts that have an answer, as the files have it."""
    return int(stack.compose("exec", "--no-TTY", "tokenizer", "python", "-c", COUNT).stdout)


def check_totals(stack: StackUnderTest, folder: Path) -> dict[str, int]:
    """Every prompt is one answer or one rejection, and none failed; returns the samples of each source.

    That each answer is one sample or dropped for a reason, the report checks itself.
    """
    stack.compose("cp", "tokenizer:/runs/.", str(folder))
    report = collect_report(Run(folder / RUN))
    generated = report["generated"]
    assert {name: counts["prompts"] for name, counts in generated.items()} == dict.fromkeys(generated, QUOTA)
    assert len(generated) == SOURCES
    assert not any(counts["failed"] for counts in generated.values())
    ended = sum(counts["completed"] + sum(counts["rejected"].values()) for counts in generated.values())
    assert ended == PROMPTS
    return {name: counts["samples"] for name, counts in report["assembled"].items()}
