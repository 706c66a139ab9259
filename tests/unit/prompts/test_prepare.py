"""Every row read is accounted for; sampling is stable; held-out prompts are never generated for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from services import chat
from services.errors import UserError
from services.files import read_json
from services.prompts.jobs import prepare, preview
from services.prompts.prepare import prepare_run
from services.records import read_prompts
from services.runs import Run, create_run
from services.settings import Settings
from services.target import tokenizer_fingerprint
from tests.unit.prompts.conftest import write_lines

PrepareQuestions = Callable[..., tuple[Run, dict[str, Any]]]


def questions(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"question": f"What is {number} + 1?"} for number in range(first, first + count)]


def ids(run: Run, source: str = "a") -> list[str]:
    return [prompt.prompt_id for prompt in read_prompts(run.prompts(source))]


def held_out_ids(run: Run, source: str = "a") -> list[str]:
    return [prompt.prompt_id for prompt in read_prompts(run.held_out(source))]


@pytest.fixture
def prepare_sources(
    tmp_path: Path,
    target_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    settings_content: dict[str, Any],
    make_settings: Callable[..., Settings],
) -> PrepareQuestions:
    """Prepare a new run of sources given as name -> (rows, quota, held_out)."""

    def prepare(name: str = "run", seed: int = 0, max_prompt_tokens: int = 256, **sources: Any) -> tuple[Run, Any]:
        settings = make_settings(
            target={"path": str(target_path), "served_name": "target", "context_length": 512},
            render={"max_prompt_tokens": max_prompt_tokens},
            seed=seed,
            sources=[
                {
                    **settings_content["sources"][0],
                    "name": source,
                    "files": [str(write_lines(tmp_path / f"{name}-{source}.jsonl", rows))],
                    "quota": quota,
                    "held_out": held_out,
                }
                for source, (rows, quota, held_out) in sources.items()
            ],
        )
        run = create_run(tmp_path / "runs", name, settings)
        return run, prepare_run(run, settings, tokenizer)

    return prepare


def test_every_row_is_accounted_for(prepare_sources: PrepareQuestions) -> None:
    rows = [
        *questions(10),
        *questions(3),
        {"question": ""},
        {"other": 1},
        "{torn",
        {"question": "long " * 500},
        {"question": "\ud800 alone"},
    ]
    run, content = prepare_sources(a=(rows, 6, 2))
    account = content["sources"]["a"]
    assert account["read"] == len(rows)
    assert account["rejected"] == {"empty_turn": 1, "missing_column": 1, "not_json": 1, "not_utf8": 1}
    assert account["rejected_rows"]["empty_turn"][0].endswith("run-a.jsonl row 14")
    assert (account["duplicates"], account["kept"], account["held_out"]) == ({"in_source": 3}, 6, 2)
    assert account["over_length"] + account["not_needed"] == 3
    assert account["kept"] == len(ids(run))
    assert account["prompt_tokens"] == sum(len(prompt.input_ids) for prompt in read_prompts(run.prompts("a")))
    assert content["total"]["read"] == len(rows)
    assert content["total"]["rejected"] == account["rejected"]
    assert content["warnings"] == []


def test_prompts_are_rendered_with_the_targets_template(
    prepare_sources: PrepareQuestions, target_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    run, content = prepare_sources(a=(questions(1), 1, 0))
    (prompt,) = read_prompts(run.prompts("a"))
    assert json.loads(prompt.messages) == [{"role": "user", "content": "What is 0 + 1?"}]
    assert prompt.tools is None
    assert prompt.input_ids == chat.render(tokenizer, json.loads(prompt.messages))
    assert content["template"] == chat.template_fingerprint(tokenizer)
    assert content["tokenizer"] == tokenizer_fingerprint(target_path)


def test_held_out_prompts_are_in_no_set_to_generate_for(prepare_sources: PrepareQuestions) -> None:
    run, content = prepare_sources(a=(questions(20) * 2, 8, 4), b=(questions(30), 30, 0))
    held_out = set(held_out_ids(run))
    assert len(held_out) == 4
    assert not held_out & {*ids(run, "a"), *ids(run, "b")}
    # What `a` took is a duplicate in `b`; what it did not need is free.
    assert content["sources"]["b"]["duplicates"] == {"in_other_source": 12}
    assert content["sources"]["b"]["kept"] == 18


def test_the_sample_does_not_depend_on_the_order_of_the_rows(prepare_sources: PrepareQuestions) -> None:
    first, _ = prepare_sources("first", a=(questions(50), 10, 5))
    second, _ = prepare_sources("second", a=(questions(50)[::-1], 10, 5))
    assert ids(first) == ids(second)
    assert held_out_ids(first) == held_out_ids(second)


def test_the_sample_depends_on_the_seed(prepare_sources: PrepareQuestions) -> None:
    first, _ = prepare_sources("first", a=(questions(50), 10, 0))
    second, _ = prepare_sources("second", seed=1, a=(questions(50), 10, 0))
    assert set(ids(first)) != set(ids(second))


def test_a_raised_quota_keeps_every_earlier_prompt(prepare_sources: PrepareQuestions) -> None:
    small, _ = prepare_sources("small", a=(questions(50), 10, 5))
    large, _ = prepare_sources("large", a=(questions(50), 30, 5))
    assert ids(large)[:10] == ids(small)
    assert held_out_ids(large) == held_out_ids(small)


def test_prompts_over_length_make_room_for_others(prepare_sources: PrepareQuestions) -> None:
    long = [{"question": f"{number} " * 300} for number in range(20)]
    run, content = prepare_sources(a=([*long, *questions(10)], 10, 0))
    assert content["sources"]["a"]["over_length"] == 20
    assert max(len(prompt.input_ids) for prompt in read_prompts(run.prompts("a"))) <= 256


def test_a_source_smaller_than_its_quota_is_warned_of(prepare_sources: PrepareQuestions) -> None:
    _, content = prepare_sources(a=(questions(5), 10, 0))
    assert content["warnings"] == ["source a: 5 prompts, its quota is 10"]


def test_a_source_without_one_prompt_is_an_error_that_counts_the_reasons(
    prepare_sources: PrepareQuestions, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"source b: none of 2 rows.*2 missing_column"):
        prepare_sources(a=(questions(5), 5, 0), b=([{"query": "Hi"}] * 2, 5, 0))
    run = Run(tmp_path / "runs" / "run")
    assert len(ids(run)) == 5
    assert not run.prepared.exists()
    assert not run.prompts("b").exists()


def test_it_goes_on_where_it_was_interrupted(prepare_sources: PrepareQuestions) -> None:
    run, content = prepare_sources(a=(questions(20), 5, 2), b=(questions(40), 9, 1))
    whole = {path: path.read_bytes() for path in run.root.rglob("*.*")}
    for lost in ([run.prepared], [run.prepared, run.source_prepared("b"), run.held_out("b")]):
        for path in lost:
            path.unlink()
        assert prepare_sources(a=(questions(20), 5, 2), b=(questions(40), 9, 1))[1] == content
        assert {path: path.read_bytes() for path in run.root.rglob("*.*")} == whole


def test_the_job_runs_twice_and_changes_nothing(
    prepare_sources: PrepareQuestions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, content = prepare_sources(a=(questions(5), 5, 0))
    run.prepared.unlink()
    monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
    prepare("run")
    prepare("run")
    assert read_json(run.prepared) == content


def test_a_preview_shows_the_first_prompts_as_the_target_sees_them(
    prepare_sources: PrepareQuestions,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _ = prepare_sources(a=(questions(5), 5, 0), b=(questions(9, first=50), 1, 0))
    monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
    preview("run", "2")
    texts = read_json(run.preview(2))
    assert {source: len(shown) for source, shown in texts.items()} == {"a": 2, "b": 1}
    first = read_prompts(run.prompts("a"))[0]
    assert texts["a"][0] == tokenizer.decode(first.input_ids)


def test_tools_that_the_template_would_drop_are_shown_in_the_system_prompt(
    tmp_path: Path,
    target_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    settings_content: dict[str, Any],
    make_settings: Callable[..., Settings],
) -> None:
    rows = [
        {"question": [[{"role": "user", "content": "5!"}]], "function": [{"name": "math.factorial"}]},
        {"question": [[{"role": "user", "content": "5!"}]], "function": []},
    ]
    tools = {"adapter": "messages", "tools_column": "function"}
    files = [str(write_lines(tmp_path / "tools.jsonl", rows))]
    settings = make_settings(
        target={"path": str(target_path), "served_name": "target", "context_length": 512},
        sources=[{**settings_content["sources"][0], **tools, "files": files, "quota": 2}],
    )
    run = create_run(tmp_path / "runs", "run", settings)
    content = prepare_run(run, settings, tokenizer)
    texts = [str(tokenizer.decode(prompt.input_ids)) for prompt in read_prompts(run.prompts("questions"))]
    assert sum("<tools>" in text and "math_factorial" in text for text in texts) == 1
    assert content["tools"] == "system prompt"
    assert content["sources"]["questions"]["tools_as_text"] == 1
    assert any("template shows no tools; 1 prompts" in warning for warning in content["warnings"])
