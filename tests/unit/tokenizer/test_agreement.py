"""Samples from ids are compared with the same answers rendered from text, and each kind of difference is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from services import chat
from services.records import Completion, Prompt
from services.tokenizer.agreement import compare
from services.tokenizer.replies import ReplyFinder

USER = '[{"role": "user", "content": "1+1?"}]'


@pytest.fixture
def prompt(tokenizer: PreTrainedTokenizerBase) -> Prompt:
    return Prompt("p", "questions", USER, None, chat.render(tokenizer, [{"role": "user", "content": "1+1?"}]))


def answer(ids: list[int], finish_reason: str = "stop") -> Completion:
    return Completion("p", "completed", None, finish_reason, ids, 1, 0.5, None)


@pytest.mark.parametrize(
    ("text", "finish_reason", "kind"),
    [
        ("It is 2.<|im_end|>", "stop", "equal"),
        ("\n\n你好 🙂\n<|im_end|>", "stop", "equal"),
        ("It is", "length", "truncated"),
    ],
)
def test_an_answer_as_the_tokenizer_would_write_it_agrees(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str, finish_reason: str, kind: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert compare(ReplyFinder(tokenizer), prompt, answer(ids, finish_reason)) == kind


def test_other_differences_are_told_apart(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> None:
    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return encoded

    finder = ReplyFinder(tokenizer)
    letters: Any = [token for letter in "It is" for token in ids(letter)]
    assert compare(finder, prompt, answer([*letters, *ids("<|im_end|>")])) == "retokenized"
    assert compare(finder, prompt, answer(ids("你")[:1], "length")) == "cut_character"
    other = Prompt("p", "questions", USER, None, [*prompt.input_ids[:-1], 5])
    assert compare(finder, other, answer(ids("2.<|im_end|>"))) == "prompt"


def test_an_answer_that_is_not_shown_is_not_taken_for_another_prompt() -> None:
    llama = chat.load_tokenizer(Path(__file__).parents[3] / "var" / "tokenizers" / "llama3")
    # The earlier reply is shown as it is; the answer's white space is trimmed.
    messages = [*json.loads(USER), {"role": "assistant", "content": "2."}, *json.loads(USER)]
    prompt = Prompt("p", "questions", json.dumps(messages), None, chat.render(llama, messages))
    ids = llama.encode("  2.<|eot_id|>", add_special_tokens=False)
    assert compare(ReplyFinder(llama), prompt, answer(ids)) == "not_shown"
