"""Which rows become prompts: duplicates, groups, filters, evaluation sets; the same whatever does the work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerBase

from services import chat
from services.errors import UserError
from services.records import read_prompts
from services.runs import Run
from tests.unit.prompts.conftest import write_lines

PrepareRows = Callable[..., tuple[Run, dict[str, Any]]]

STORY = "The miller of the village by the old stone bridge had seven daughters and not one of them wanted to marry."


def questions(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"question": f"What is {number} + 1?"} for number in range(first, first + count)]


def texts(run: Run, source: str = "a") -> list[str]:
    return [json.loads(prompt.messages)[-1]["content"] for prompt in read_prompts(run.prompts(source))]


def ids(run: Run, source: str = "a") -> list[str]:
    return [prompt.prompt_id for prompt in read_prompts(run.prompts(source))]


def test_the_number_of_processes_changes_nothing(prepare_rows: PrepareRows) -> None:
    sources = {
        "a": {"rows": [*questions(1500), "{torn", *questions(9), {"question": ""}], "quota": 400, "held_out": 30},
        "b": {"rows": questions(1600), "quota": 300},
    }
    one, of_one = prepare_rows("one", 1, sources)
    three, of_three = prepare_rows("three", 3, sources)
    assert of_one == of_three
    for source in sources:
        for path in (Run.prompts, Run.held_out):
            assert read_prompts(path(one, source)) == read_prompts(path(three, source))


def test_near_duplicates_are_dropped_within_and_across_sources(prepare_rows: PrepareRows) -> None:
    near = f"{STORY} Why?"
    sources = {
        "a": {"rows": [{"question": STORY}, {"question": near}, *questions(3)], "quota": 9},
        "b": {"rows": [{"question": f"{STORY} Now?"}, *questions(3, first=10)], "quota": 9},
    }
    run, content = prepare_rows(sources=sources)
    assert sum(STORY in text for text in texts(run)) == 1
    assert content["sources"]["a"]["duplicates"] == {"near": 1}
    assert content["sources"]["b"]["duplicates"] == {"near": 1}
    assert len(ids(run, "a")) == 4
    assert len(ids(run, "b")) == 3


def test_near_duplicates_may_be_kept(prepare_rows: PrepareRows) -> None:
    rows = [{"question": STORY}, {"question": f"{STORY} Why?"}]
    kept, _ = prepare_rows("kept", sources={"a": {"rows": rows, "quota": 9, "near_duplicates": "keep"}})
    exact, _ = prepare_rows("exact", sources={"a": {"rows": rows, "quota": 9}}, prepare={"deduplicate": {"near": None}})
    assert len(ids(kept)) == len(ids(exact)) == 2


def test_a_raised_quota_keeps_earlier_prompts_with_near_duplicates_and_groups(prepare_rows: PrepareRows) -> None:
    rows = [{"question": f"{STORY} Number {number}?", "group": f"group {number % 7}"} for number in range(60)] + [
        {**row, "group": row["question"][:9]} for row in questions(60)
    ]
    source = {"rows": rows, "group_by": "group"}
    small, _ = prepare_rows("small", sources={"a": {**source, "quota": 10}})
    large, _ = prepare_rows("large", sources={"a": {**source, "quota": 25}})
    assert ids(large)[:10] == ids(small)


def test_groups_take_turns(prepare_rows: PrepareRows) -> None:
    rows = [
        {"question": f"Say {number} in {group} ways.", "original": f"group {group}"}
        for group, size in enumerate((20, 3, 1))
        for number in range(size)
    ]
    source = {"rows": rows, "group_by": "original", "near_duplicates": "keep"}
    run, _ = prepare_rows(sources={"a": {**source, "quota": 8}})
    groups = [text.split()[3] for text in texts(run)]
    assert sorted(groups[:3]) == ["0", "1", "2"]
    assert sorted(groups[3:5]) == ["0", "1"]
    assert sorted(groups[5:7]) == ["0", "1"]
    assert groups[7] == "0"


def test_rewrites_of_what_is_held_out_are_not_generated_for(prepare_rows: PrepareRows) -> None:
    rows = [
        {"question": f"Say {number} in {group} ways.", "original": f"group {group}"}
        for group in range(4)
        for number in range(3)
    ]
    source = {"rows": rows, "group_by": "original", "near_duplicates": "keep", "quota": 20}
    run, content = prepare_rows(sources={"a": {**source, "held_out": 2}})
    held_out = {json.loads(prompt.messages)[0]["content"].split()[3] for prompt in read_prompts(run.held_out("a"))}
    assert len(held_out) == 2
    assert {text.split()[3] for text in texts(run)} == {"0", "1", "2", "3"} - held_out
    account = content["sources"]["a"]
    assert (account["held_out"], account["kept"], account["duplicates"]) == (2, 6, {"held_out_group": 4})
    with pytest.raises(UserError, match="7 held_out_group"):
        prepare_rows("all", sources={"a": {**source, "held_out": 5}})


def test_a_row_without_its_group_is_rejected_and_null_is_a_group_of_its_own(prepare_rows: PrepareRows) -> None:
    rows = [{**row, "original": None} for row in questions(4)] + questions(2, first=10)
    run, content = prepare_rows(sources={"a": {"rows": rows, "group_by": "original", "quota": 4}})
    assert len(ids(run)) == 4
    assert content["sources"]["a"]["rejected"] == {"missing_column": 2}


def test_prompts_without_a_word_are_not_near_duplicates_of_each_other(
    prepare_rows: PrepareRows, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    held = chat.render(tokenizer, [{"role": "user", "content": "!?"}])
    rows = {"input_ids": [[*held, 5]], "loss_mask": [[0] * len(held) + [1]], "seq_len": [len(held) + 1]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "base"))
    asked = ["🙂", "???", "∑ + ∂", "!?"]
    sources = {"a": {"rows": [{"question": text} for text in asked], "quota": 9}}
    run, content = prepare_rows(sources=sources, merge={"base": str(tmp_path / "base")})
    assert sorted(texts(run)) == sorted(asked[:3])
    assert content["sources"]["a"]["duplicates"] == {"in_corpus": 1}


def test_rows_are_filtered_by_column_and_by_language(prepare_rows: PrepareRows) -> None:
    rows = [
        {"question": "Why is ice lighter than water?", "source": "socratic", "language": "en"},
        {"question": "Why is the sky blue at noon?", "source": "forum", "language": "en"},
        {"question": "为什么天空是蓝色的", "source": "forum", "language": "zh-cn"},
        {"question": "Por que o céu é azul?", "source": "forum", "language": "pt"},
        {"question": "Pourquoi le ciel est-il bleu quand il fait beau à midi ?", "source": "forum", "language": None},
    ]
    rule = {"column": "source", "values": ["socratic"], "reason": "licence"}
    filters = {"languages": ["en", "zh"], "language_column": "language", "reject": [rule]}
    run, content = prepare_rows(sources={"a": {"rows": rows, "quota": 2, "filters": filters}})
    assert content["sources"]["a"]["rejected"] == {"licence": 1, "other_language": 2}
    assert sorted(texts(run)) == ["Why is the sky blue at noon?", "为什么天空是蓝色的"]


@pytest.mark.parametrize(
    ("unwanted", "wanted", "named"),
    [(False, True, "false"), (None, "x", "null"), (5, 50, "5"), ("NC", "BY", "NC")],
)
def test_a_rule_names_values_as_the_file_writes_them(
    prepare_rows: PrepareRows, unwanted: Any, wanted: Any, named: str
) -> None:
    rows = [{**row, "licence": value} for row, value in zip(questions(2), (unwanted, wanted), strict=True)]
    filters = {"reject": [{"column": "licence", "values": [named], "reason": "licence"}]}
    _, content = prepare_rows(sources={"a": {"rows": rows, "quota": 2, "filters": filters}})
    assert (content["sources"]["a"]["rejected"], content["sources"]["a"]["kept"]) == ({"licence": 1}, 1)


def test_a_language_that_no_column_tells_is_detected(prepare_rows: PrepareRows) -> None:
    french = {"question": "Pourquoi le ciel est-il bleu quand il fait beau à midi ?"}
    code = {"question": "def f(x):\n    return x + 1"}
    run, content = prepare_rows(
        sources={"a": {"rows": [french, code, *questions(3)], "quota": 4, "filters": {"languages": ["en"]}}}
    )
    assert content["sources"]["a"]["rejected"] == {"other_language": 1}
    assert len(ids(run)) == 4


def test_prompts_that_overlap_an_evaluation_set_are_dropped_and_counted(
    prepare_rows: PrepareRows, tmp_path: Path
) -> None:
    seen = write_lines(tmp_path / "seen.jsonl", [{"q": f"Long ago, {STORY}"}, {"q": "What is 3 + 1?"}, {"q": ""}])
    evaluation = {"name": "seen", "files": [str(seen)], "adapter": "question", "column": "q"}
    rows = [{"question": f"Go on: {STORY.upper()}"}, *questions(6)]
    decontaminate = {"against": [evaluation]}
    run, content = prepare_rows(sources={"a": {"rows": rows, "quota": 9}}, prepare={"decontaminate": decontaminate})
    assert content["sources"]["a"]["contaminated"] == {"seen": 2}
    assert len(ids(run)) == 5
    assert "What is 3 + 1?" not in texts(run)
    assert content["evaluation_sets"] == {"seen": {"prompts": 2, "rejected": {"empty_turn": 1}}}
    wrong = {"against": [{**evaluation, "column": "other"}]}
    with pytest.raises(UserError, match="evaluation set seen: no prompt in"):
        prepare_rows("wrong", sources={"a": {"rows": rows, "quota": 9}}, prepare={"decontaminate": wrong})


def test_prompts_of_the_existing_corpus_are_dropped_by_their_text(prepare_rows: PrepareRows, tmp_path: Path) -> None:
    held = [{"q": "What is 3 + 1?"}, {"q": f"{STORY} Why?"}, {"q": "\ud800"}]
    corpus = {"name": "old", "files": [str(write_lines(tmp_path / "old.jsonl", held))]}
    against = [{**corpus, "adapter": "question", "column": "q"}]
    run, content = prepare_rows(
        sources={"a": {"rows": [{"question": STORY}, *questions(6)], "quota": 9}},
        prepare={"deduplicate": {"against": against}},
    )
    assert content["sources"]["a"]["duplicates"] == {"in_corpus": 1, "near": 1}
    assert len(ids(run)) == 5
    assert content["corpora"] == {"old": {"prompts": 2, "rejected": {"not_utf8": 1}}}
    wrong = {"against": [{**against[0], "column": "other"}]}
    with pytest.raises(UserError, match=r"existing corpus old: no prompt in .*missing_column"):
        prepare_rows("wrong", sources={"a": {"rows": questions(6), "quota": 9}}, prepare={"deduplicate": wrong})


def test_prompts_of_the_existing_corpus_are_dropped_by_their_token_ids(
    prepare_rows: PrepareRows, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids_of_prompt = chat.render(tokenizer, [{"role": "user", "content": "What is 3 + 1?"}])
    rows = {
        "input_ids": [[*ids_of_prompt, 5, 6], [1, 2]],
        "loss_mask": [[0] * len(ids_of_prompt) + [1, 1], [0, 0]],
        "seq_len": [len(ids_of_prompt) + 2, 2],
    }
    base = tmp_path / "base"
    datasets.Dataset.from_dict(rows).save_to_disk(str(base))
    run, content = prepare_rows(sources={"a": {"rows": questions(6), "quota": 9}}, merge={"base": str(base)})
    assert content["sources"]["a"]["duplicates"] == {"in_corpus": 1}
    assert "What is 3 + 1?" not in texts(run)
    assert content["corpora"] == {"tokenized": {"prompts": 1}}


def test_near_duplicates_of_the_existing_corpus_are_found_in_its_token_ids(
    prepare_rows: PrepareRows, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    history = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": f"{STORY} Why?"}]
    held = [chat.render(tokenizer, history), chat.render(tokenizer, [{"role": "user", "content": "What else?"}])]
    rows = {
        "input_ids": [[*prompt, 5, 6] for prompt in held],
        "loss_mask": [[0] * len(prompt) + [1, 1] for prompt in held],
        "seq_len": [len(prompt) + 2 for prompt in held],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "base"))
    sources = {"a": {"rows": [{"question": STORY}, *questions(3)], "quota": 9}}
    run, content = prepare_rows(sources=sources, merge={"base": str(tmp_path / "base")})
    assert content["sources"]["a"]["duplicates"] == {"near_corpus": 1}
    assert STORY not in texts(run)
    exact = {"deduplicate": {"near": None}}
    run, content = prepare_rows("exact", sources=sources, merge={"base": str(tmp_path / "base")}, prepare=exact)
    assert content["sources"]["a"]["duplicates"] == {}


def test_an_existing_corpus_may_name_its_columns_otherwise(
    prepare_rows: PrepareRows, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids_of_prompt = chat.render(tokenizer, [{"role": "user", "content": "What is 3 + 1?"}])
    rows = {"tokens": [[*ids_of_prompt, 5]], "labels": [[0] * len(ids_of_prompt) + [1]]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "base"))
    merge = {"base": str(tmp_path / "base"), "base_columns": {"input_ids": "tokens", "loss_mask": "labels"}}
    run, content = prepare_rows(sources={"a": {"rows": questions(6), "quota": 9}}, merge=merge)
    assert content["sources"]["a"]["duplicates"] == {"in_corpus": 1}
    assert "What is 3 + 1?" not in texts(run)


def test_an_existing_corpus_that_cannot_be_read_is_told(prepare_rows: PrepareRows, tmp_path: Path) -> None:
    splits, columns = tmp_path / "splits", tmp_path / "columns"
    dataset = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(splits))
    dataset.save_to_disk(str(columns))
    for base, told in ((tmp_path / "none", "No such file"), (splits, "several splits"), (columns, "input_ids")):
        with pytest.raises(UserError, match=rf"corpus {base}: .*{told}") as caught:
            prepare_rows(base.name, sources={"a": {"rows": questions(6), "quota": 9}}, merge={"base": str(base)})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("input_ids", "told"),
    [
        ([[3, 4], [5, -100, 6]], r"row 1: id -100 is outside every vocabulary; remove or mend such rows"),
        ([[3, 4], [5, None, 6]], r"row 1: id None is outside"),
        ([[3, 2**40, 4]], r"row 0: id 1099511627776 is outside"),
        ([["a", "b"]], r"no column of lists of integers 'input_ids'"),
        ([[True, False]], r"no column of lists of integers 'input_ids'"),
    ],
)
def test_an_id_of_the_existing_corpus_that_is_no_tokens_is_named(
    prepare_rows: PrepareRows, tmp_path: Path, input_ids: list[list[Any]], told: str
) -> None:
    rows = {
        "input_ids": input_ids,
        "loss_mask": [[0] * (len(row) - 1) + [1] for row in input_ids],
        "seq_len": [len(row) for row in input_ids],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "base"))
    with pytest.raises(UserError, match=told):
        prepare_rows(sources={"a": {"rows": questions(6), "quota": 9}}, merge={"base": str(tmp_path / "base")})


def test_the_mix_adds_up_before_and_after(prepare_rows: PrepareRows) -> None:
    sources = {
        "a": {"rows": questions(30), "quota": 30, "domain": "general"},
        "b": {"rows": questions(10, first=50), "quota": 10, "domain": "math"},
    }
    corpus = {"samples": 100, "percent": {"code": 77, "general": 15, "tools": 6, "math": 1}}
    _, content = prepare_rows(sources=sources, prepare={"corpus": corpus})
    mix = content["mix"]
    assert mix["before"]["code"] == {"samples": 77, "percent": 77.0}
    assert mix["before"]["other"] == {"samples": 1, "percent": 1.0}
    assert mix["after"]["general"] == {"samples": 45, "percent": 32.1}
    assert sum(share["samples"] for share in mix["after"].values()) == 140
    assert mix["prompts"] == {
        "general": {"samples": 30, "percent": 75.0},
        "math": {"samples": 10, "percent": 25.0},
    }


def test_lengths_are_counted(prepare_rows: PrepareRows) -> None:
    run, content = prepare_rows(sources={"a": {"rows": [*questions(9), {"question": STORY}], "quota": 10}})
    lengths = content["sources"]["a"]["lengths"]
    assert sum(lengths.values()) == 10
    for prompt in read_prompts(run.prompts("a")):
        assert any(int(length) / 2 < len(prompt.input_ids) <= int(length) for length in lengths)
