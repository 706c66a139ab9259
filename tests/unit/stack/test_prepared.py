"""What `prepare` did is shown as it stands in prepare.json, as tables and as a picture."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.files import replace_json
from services.runs import Run
from services.settings import load_settings
from services.stack.plots import plot_prompts
from services.stack.prepared import print_prepared, print_preview
from services.stack.stages import prepare_standing

DEMO = Path(__file__).parents[3] / "config" / "demo.yaml"


def account(**counts: Any) -> dict[str, Any]:
    nothing = {"rejected": {}, "duplicates": {}, "contaminated": {}, "over_length": 0, "not_needed": 0, "held_out": 0}
    return {**nothing, **counts}


@pytest.fixture
def prepared() -> dict[str, Any]:
    math = account(read=660_000, rejected={"not_json": 3, "licence": 1_200}, kept=24_000, quota=24_000)
    tools = account(read=90, duplicates={"near": 4}, contaminated={"bfcl": 2}, kept=50, quota=60)
    total = account(
        read=660_090,
        rejected={"not_json": 3, "licence": 1_200},
        duplicates={"near": 4},
        contaminated={"bfcl": 2},
        kept=24_050,
        quota=24_060,
        prompt_tokens=2_000_000,
        lengths={"64": 24_000, "128": 50},
    )
    return {
        "sources": {"math": math, "tools": tools},
        "total": total,
        "mix": {
            "before": {"code": {"samples": 77, "percent": 77.0}, "other": {"samples": 23, "percent": 23.0}},
            "prompts": {"math": {"samples": 24_000, "percent": 99.8}},
            "after": {"math": {"samples": 24_000, "percent": 99.6}, "code": {"samples": 77, "percent": 0.3}},
        },
        "warnings": ["source tools: 50 prompts, its quota is [60]"],
    }


def shown(width: int = 120) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, width=width, highlight=False), output


def test_every_count_is_shown_with_its_reasons(prepared: dict[str, Any]) -> None:
    console, output = shown(width=80)
    print_prepared(prepared, console)
    lines = output.getvalue().splitlines()
    assert next(line for line in lines if line.startswith("math ")).split()[:3] == ["math", "660,000", "1,203"]
    assert "rejected: math: licence 1,200, not_json 3" in lines
    assert "duplicates: tools: near 4" in lines
    assert "contaminated: tools: bfcl 2" in lines
    assert "warning: source tools: 50 prompts, its quota is [60]" in lines
    assert any("code" in line and "77.0" in line and "0.3" in line for line in lines)
    assert "…" not in output.getvalue()


def test_a_picture_is_drawn_with_and_without_a_corpus(prepared: dict[str, Any], tmp_path: Path) -> None:
    for name, mix in (("with", prepared["mix"]), ("without", {"prompts": prepared["mix"]["prompts"]})):
        path = tmp_path / f"{name}.png"
        plot_prompts({**prepared, "mix": mix}, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_previewed_prompts_are_printed_as_they_are() -> None:
    console, output = shown()
    print_preview({"math": ["<|im_start|>user\n[b]1+1[/b]?", "2"]}, console)
    assert "<|im_start|>user\n[b]1+1[/b]?" in output.getvalue()
    assert "math 1 of 2" in output.getvalue()


def test_progress_is_told_by_source(tmp_path: Path) -> None:
    run, settings = Run(tmp_path), load_settings(DEMO)
    assert prepare_standing(run, settings) == {}
    later = {"read": 0, "scanned": 0.0, "drawn": 0.0, "kept": 0}
    begun = {"read": 5_000, "scanned": 1.0, "drawn": 0.5, "kept": 12}
    progress = {source.name: later for source in settings.sources} | {"bfcl": begun}
    replace_json(run.prepare_progress, progress)
    assert set(prepare_standing(run, settings)) == {"bfcl"}
    standing = prepare_standing(run, settings)["bfcl"]
    assert (standing.done, standing.total) == (75, 100)
    assert standing.note == "% 5,000 rows, 12 prompts"
