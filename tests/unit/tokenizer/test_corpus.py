"""Conversations that come as text become a dataset of samples, and every line is accounted for."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase
from typer import Typer
from typer.testing import CliRunner

from services.errors import UserError
from services.files import read_json
from services.tokenizer.corpus import Length, build_corpus, main
from services.tokenizer.replies import ReplyFinder, TextRow


def conversation(question: str, answer: str | None) -> str:
    messages = [{"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return json.dumps({"messages": messages})


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "conversations.jsonl"
    lines = [
        conversation("1+1?", "2."),
        conversation("2+2?", "4."),
        conversation("Hello?", None),
        conversation("Talk.", "long " * 100),
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        "[]",
        "{torn",
    ]
    path.write_text("\n".join(lines))
    return path


def test_samples_are_masked_and_lines_are_counted(
    conversations: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    counts = build_corpus(conversations, ReplyFinder(tokenizer), tmp_path / "corpus", Length(80))
    assert (counts["read"], counts["samples"]) == (8, 2)
    assert counts["conversations"] == 2
    assert counts["dropped"] == {"no_supervised_token": 1, "over_length": 1, "no_conversation": 4}
    corpus: Any = datasets.load_from_disk(str(tmp_path / "corpus"))
    replies = [
        tokenizer.decode([token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask])
        for row in corpus
    ]
    assert replies == ["2.<|im_end|>", "4.<|im_end|>"]
    assert sum(corpus["seq_len"]) == counts["tokens"]
    assert sum(map(sum, corpus["loss_mask"])) == counts["supervised_tokens"]


def test_a_corpus_that_is_there_is_left_as_it_is(
    conversations: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    counts = build_corpus(conversations, ReplyFinder(tokenizer), tmp_path / "corpus")
    conversations.write_text(conversation("3+3?", "6."))
    assert build_corpus(conversations, ReplyFinder(tokenizer), tmp_path / "corpus") == counts


def test_a_corpus_that_was_made_otherwise_is_refused_and_left_alone(
    conversations: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    finder, output = ReplyFinder(tokenizer), tmp_path / "corpus"
    counts = build_corpus(conversations, finder, output, Length(80), template="one")
    other = conversations.with_name("other.jsonl")
    other.write_text(conversation("3+3?", "6."))
    with pytest.raises(UserError, match=r"made otherwise \(file was .*conversations\.jsonl, is .*other\.jsonl\)"):
        build_corpus(other, finder, output, Length(80), template="one")
    with pytest.raises(UserError, match="max_length was 80, is None; template was one, is two"):
        build_corpus(conversations, finder, output, template="two")
    assert build_corpus(conversations, finder, output, Length(80), template="one") == counts


def test_a_folder_that_is_something_else_is_left_alone(
    conversations: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is no corpus made here"):
        build_corpus(conversations, ReplyFinder(tokenizer), tmp_path)
    assert list(tmp_path.iterdir()) == [conversations]


def test_a_file_without_a_sample_is_told_and_leaves_nothing(
    conversations: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    conversations.write_text(conversation("Hello?", None))
    with pytest.raises(UserError, match="none of 1 rows gives a sample"):
        build_corpus(conversations, ReplyFinder(tokenizer), tmp_path / "corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["conversations.jsonl"]


def test_the_command_tells_what_it_made_and_what_was_wrong(
    conversations: Path, target_path: Path, tmp_path: Path
) -> None:
    command = Typer()
    command.command()(main)
    made = CliRunner().invoke(command, [str(conversations), str(target_path), str(tmp_path / "corpus")])
    assert made.exit_code == 0
    assert "3 samples of 8 conversations" in made.output
    assert read_json(tmp_path / "corpus" / "corpus.json")["samples"] == 3

    wrong = CliRunner().invoke(command, [str(tmp_path / "none"), str(target_path), str(tmp_path / "other")])
    assert wrong.exit_code == 1
    assert wrong.output.startswith("error: conversations ")
    assert not (tmp_path / "other").exists()

    in_a_file = CliRunner().invoke(command, [str(conversations), str(target_path), str(conversations / "corpus")])
    assert in_a_file.exit_code == 1
    assert in_a_file.output.startswith("error: ")
    assert len(in_a_file.output.splitlines()) == 1


def test_conversations_come_as_parquet_and_as_sharegpt_too(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2."}]
    turns = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2."}]
    rows = {"messages": [json.dumps(messages), None], "conversations": [None, json.dumps(turns)], "id": ["a", "b"]}
    pq.write_table(pa.table(rows), tmp_path / "conversations.parquet")
    build_corpus(tmp_path / "conversations.parquet", ReplyFinder(tokenizer), tmp_path / "corpus")
    corpus: Any = datasets.load_from_disk(str(tmp_path / "corpus"))
    assert len(corpus) == 2
    assert corpus[0] == corpus[1]


@pytest.mark.parametrize(
    ("mask", "limit", "over", "expected"),
    [
        ([0, 0, 1, 1], 4, "drop", ([0, 1, 2, 3], [0, 0, 1, 1])),
        ([0, 0, 1, 1], 3, "drop", None),
        ([0, 0, 1, 1], 3, "keep_tail", ([1, 2, 3], [0, 1, 1])),
        # Of the last reply nothing may go, nor may it stand without a token before it.
        ([0, 0, 1, 1], 2, "keep_tail", None),
        ([0, 1, 1, 1], 2, "keep_tail", None),
        # An earlier one becomes context when its beginning goes.
        ([0, 1, 1, 0, 1, 1], 4, "keep_tail", ([2, 3, 4, 5], [0, 0, 1, 1])),
        # Or when nothing is left before it.
        ([0, 1, 1, 0, 1, 1], 5, "keep_tail", ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])),
    ],
)
def test_a_longer_sample_is_dropped_or_keeps_its_tail(
    mask: list[int], limit: int, over: Any, expected: tuple[list[int], list[int]] | None
) -> None:
    row = Length(limit, over).fit(TextRow(list(range(len(mask))), mask, (1,)))
    assert (row and (row.input_ids, row.loss_mask)) == expected


def test_replies_that_a_shorter_sample_loses_are_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "conversations.jsonl"
    path.write_text(json.dumps({"messages": [USER, {**REPLY, "content": "two " * 50}, USER, REPLY]}))
    whole = build_corpus(path, ReplyFinder(tokenizer), tmp_path / "whole")
    assert (whole["supervised_turns"], whole["skipped"]) == (2, {})
    # Within the first reply, and past it.
    for limit in (whole["tokens"] - 40, 20):
        cut = build_corpus(path, ReplyFinder(tokenizer), tmp_path / f"{limit}", Length(limit, "keep_tail"))
        assert (cut["shortened"], cut["supervised_turns"], cut["skipped"]) == (1, 1, {"cut": 1})


USER, REPLY = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2."}


def calling(calls: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}, REPLY]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (calling("ls"), "not_json"),
        (calling({"name": "ls"}), "bad_tool_call"),
        (calling(["ls"]), "bad_tool_call"),
        (calling([{"function": "ls"}]), "bad_tool_call"),
        (calling([{"function": {"arguments": {}}}]), "bad_tool_call"),
        (calling([{"function": {"name": "ls", "arguments": "[" * 100_000}}]), "not_json"),
        ({"messages": [USER, REPLY], "tools": ["ls"]}, "bad_tools"),
        ({"messages": [USER, REPLY], "tools": {"name": "ls"}}, "bad_tools"),
        ({"messages": [USER, {**REPLY, "reasoning_content": ["easy"]}]}, "not_text"),
        ({"messages": [{"role": "user", "content": "half of a pair: \ud83d"}, REPLY]}, "not_utf8"),
        ({"messages": "[" * 100_000}, "not_json"),
        ({"conversations": [{"from": ["human"], "value": "1+1?"}]}, "no_conversation"),
        ('{"messages": ' + "[" * 100_000, "no_conversation"),
    ],
)
def test_a_row_of_another_shape_is_counted_and_the_others_are_made(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, row: Any, reason: str
) -> None:
    path = tmp_path / "conversations.jsonl"
    path.write_text((row if isinstance(row, str) else json.dumps(row)) + "\n" + conversation("1+1?", "2."))
    counts = build_corpus(path, ReplyFinder(tokenizer), tmp_path / "corpus")
    assert (counts["samples"], counts["dropped"]) == (1, {reason: 1})


def test_calls_and_tools_may_be_json_text_or_empty(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "ls", "arguments": {}}}
    plain = {"messages": [USER, REPLY]}
    rows = [calling([call]), calling(json.dumps([call])), plain, {**plain, "tools": ""}, {**plain, "tools": "[]"}]
    path = tmp_path / "conversations.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    build_corpus(path, ReplyFinder(tokenizer), tmp_path / "corpus")
    corpus: Any = datasets.load_from_disk(str(tmp_path / "corpus"))
    assert corpus[0] == corpus[1]
    assert corpus[2] == corpus[3] == corpus[4]


def test_text_in_parquet_that_is_not_utf8_costs_its_own_row(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    texts = [json.dumps([USER, REPLY]).encode(), b"\xff[]", json.dumps([USER, REPLY]).encode()]
    unchecked = pa.array(texts, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"messages": unchecked}), tmp_path / "conversations.parquet")
    counts = build_corpus(tmp_path / "conversations.parquet", ReplyFinder(tokenizer), tmp_path / "corpus")
    assert (counts["read"], counts["samples"], counts["dropped"]) == (3, 2, {"no_conversation": 1})
