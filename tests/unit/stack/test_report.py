"""The report tells what the run's files hold, and refuses to when they do not add up."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.errors import UserError
from services.files import publish_json
from services.records import Completion, write_completions
from services.runs import Run, create_run
from services.settings import load_settings
from services.stack.report import collect_report, print_report, write_report
from services.stack.status import StatusView

DEMO = Path(__file__).parents[3] / "config" / "demo.yaml"
CHUNKS = [
    {"chunk": "mtbench-00000", "source": "mtbench", "first": 0, "count": 2},
    {"chunk": "mtbench-00001", "source": "mtbench", "first": 2, "count": 1},
]


def completion(name: str, status: Any, reason: str | None, tokens: int) -> Completion:
    return Completion(name, status, reason, "stop", [7] * tokens, 1, 0.5, "http://server")


def counts(size: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("samples", "tokens", "supervised_tokens"), size, strict=True))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A generated and merged run: three prompts, one of them rejected, and a corpus of one sample."""
    run = create_run(tmp_path, "run", load_settings(DEMO))
    publish_json(run.prepared, {"sources": {"mtbench": {"read": 9, "kept": 3}}, "total": {"held_out": 1}})
    publish_json(run.chunks, {"chunks": CHUNKS})
    first = [completion("a", "completed", None, 4), completion("b", "rejected", "repetition", 6)]
    for path, completions in (
        (run.completions("mtbench-00000"), first),
        (run.completions("mtbench-00001"), [completion("c", "completed", None, 5)]),
    ):
        path.parent.mkdir(exist_ok=True)
        write_completions(path, completions)
    for chunk, (completed, rejected, tokens, supervised) in {
        "mtbench-00000": (1, 1, 10, 4),
        "mtbench-00001": (1, 0, 12, 5),
    }.items():
        content = {"chunk": chunk, "source": "mtbench", "completions": completed + rejected, "completed": completed}
        content |= {"rejected": rejected, "samples": 1, "dropped": {}}
        content |= {"tokens": tokens, "supervised_tokens": supervised}
        publish_json(run.assembled(chunk), content)
    parts = {"existing": (1, 20, 9), "mtbench": (2, 22, 9)}
    shares = {"samples_percent": 50.0, "tokens_percent": 50.0}
    publish_json(
        run.merged,
        {
            "before": counts((1, 20, 9)),
            "added": counts((2, 22, 9)),
            "after": counts((3, 42, 18)),
            "growth_percent": {"samples": 200.0, "tokens": 110.0},
            "dropped": {},
            "sources": {name: {**counts(size), **shares} for name, size in parts.items()},
        },
    )
    run.training.mkdir()
    lines = [
        {"step": step, "loss": 5.0 - step / 10, "accuracy": 0.1, "tokens": 100, "seconds": step * 2.0}
        for step in (10, 20)
    ]
    run.training_metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, length in (("before", 1.0), ("after", 1.25)):
        part = {"prompts": 1, "tokens": 50, "acceptance_length": length, "degenerate": 0}
        lossless = {"lossless": True, "compared_tokens": 50, "mismatches": [], "numeric_ties": []}
        publish_json(run.evaluation(name), {"overall": part, "by_source": {"mtbench": part}, "lossless": lossless})
    return run


def printed(run: Run, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_report(collect_report(run), console)
    console.print(StatusView(run, None).render())
    return console.export_text()


def test_the_printed_report_has_every_number(run: Run) -> None:
    text = printed(run)
    assert "rejected: mtbench: repetition 1" in text
    assert "failed: none" in text
    for number in ("+200.0", "+110.0", "1.250", "loss 4.000 -> 3.000", "20 steps, 200 tokens in 40 s (5 tok/s)"):
        assert number in text
    assert "before 50 equal, 0 prompts differ; after 50 equal, 0 prompts differ" in text


def test_report_and_status_fit_into_eighty_columns(run: Run) -> None:
    text = printed(run, 80)
    assert "…" not in text
    # The report's reasons are by source, those of the status of the whole run.
    assert [line for line in text.splitlines() if line.startswith("rejected: ")] == [
        "rejected: mtbench: repetition 1",
        "rejected: repetition 1",
    ]


def test_the_written_report_is_json_with_two_plots(run: Run, tmp_path: Path) -> None:
    write_report(collect_report(run), run, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["generated"]["mtbench"] == {
        "prompts": 3,
        "completed": 2,
        "rejected": {"repetition": 1},
        "failed": {},
        "output_tokens": 9,
    }
    for name in ("loss.png", "acceptance.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_has_only_begun_is_reported_too(tmp_path: Path) -> None:
    run = create_run(tmp_path, "begun", load_settings(DEMO))
    report = collect_report(run)
    assert report["merged"] is None
    assert report["training"] is None
    assert "run begun" in printed(run)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (lambda run: run.prepared, {"sources": {"mtbench": {"read": 9, "kept": 4}}}, "prompts of mtbench"),
        (lambda run: run.assembled("mtbench-00000"), {"samples": 0}, "answers of mtbench"),
        (lambda run: run.merged, {"added": counts((3, 22, 9))}, "merge"),
        (lambda run: run.merged, {"after": counts((4, 42, 18))}, "dataset"),
    ],
)
def test_totals_that_do_not_add_up_are_refused(run: Run, path: Any, change: dict[str, Any], message: str) -> None:
    file = path(run)
    content = json.loads(file.read_text()) | change
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"^{message}: .* the run's files disagree"):
        collect_report(run)
