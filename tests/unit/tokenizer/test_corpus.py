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
from services.runs import read_json
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
    ],
)
def test_a_longer_sample_is_dropped_or_keeps_its_tail(
    mask: list[int], limit: int, over: Any, expected: tuple[list[int], list[int]] | None
) -> None:
    row = Length(limit, over).fit(TextRow(list(range(len(mask))), mask, (1,)))
    assert (row and (row.input_ids, row.loss_mask)) == expected
