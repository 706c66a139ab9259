"""Conversations that come as text become a dataset of samples, and every line is accounted for."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerBase
from typer import Typer
from typer.testing import CliRunner

from services.errors import UserError
from services.runs import read_json
from services.tokenizer.corpus import build_corpus, main


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
    counts = build_corpus(conversations, tokenizer, tmp_path / "corpus", max_length=80)
    assert (counts["read"], counts["samples"]) == (8, 2)
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
    counts = build_corpus(conversations, tokenizer, tmp_path / "corpus")
    conversations.write_text(conversation("3+3?", "6."))
    assert build_corpus(conversations, tokenizer, tmp_path / "corpus") == counts


def test_a_folder_that_is_something_else_is_left_alone(
    conversations: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is no corpus made here"):
        build_corpus(conversations, tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == [conversations]


def test_a_file_without_a_sample_is_told_and_leaves_nothing(
    conversations: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    conversations.write_text(conversation("Hello?", None))
    with pytest.raises(UserError, match="none of 1 lines gives a sample"):
        build_corpus(conversations, tokenizer, tmp_path / "corpus")
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
