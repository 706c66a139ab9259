"""A mask covers exactly what the model would generate: golden cases, the supervised tokens between [[ and ]]."""

# ruff: noqa: E501, RUF001  (golden texts, one a line)
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from services import chat
from services.errors import UserError
from services.tokenizer.encoding import PieceEncoder
from services.tokenizer.replies import RejectedError, ReplyFinder, TextRow

Load = Callable[[str], PreTrainedTokenizerBase]

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "1+1?"}
MORE = {"role": "user", "content": "2+2?"}
REPLY = {"role": "assistant", "content": "2."}
THOUGHT = {"role": "assistant", "content": "4.", "reasoning_content": "easy"}
IN_CONTENT = {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4."}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
ASKED_TOOL = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2"}

# Turns of ChatML.
ASK, ASK_MORE = "<|im_start|>user\n1+1?<|im_end|>\n", "<|im_start|>user\n2+2?<|im_end|>\n"
HEAD = "<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"
SMOL = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
# Turns of Llama 3.
LLAMA_SYSTEM = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n<|eot_id|>"
)
LLAMA_ASK, LLAMA_MORE = (f"<|start_header_id|>user<|end_header_id|>\n\n{text}<|eot_id|>" for text in ("1+1?", "2+2?"))
LLAMA_HEAD = "<|start_header_id|>assistant<|end_header_id|>\n\n"


def says(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def asks(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def marked(tokenizer: PreTrainedTokenizerBase, row: TextRow) -> str:
    """The sample's text with its supervised tokens between [[ and ]]."""
    assert len(row.input_ids) == len(row.loss_mask)
    text, run = "", []
    for number, token in enumerate(row.input_ids):
        run.append(token)
        mask = row.loss_mask[number]
        if number + 1 == len(row.input_ids) or row.loss_mask[number + 1] != mask:
            part = str(tokenizer.decode(run))
            text += f"[[{part}]]" if mask else part
            run = []
    return text


GOLDEN: list[tuple[str, str, list[dict[str, Any]], list[str]]] = [
    # Several turns.
    ("smollm2", "last_turn", [USER, REPLY, MORE, says("4.")], [f"{SMOL}{ASK}{HEAD}[[2.<|im_end|>]]\n{ASK_MORE}{HEAD}[[4.<|im_end|>]]"]),
    (
        "llama3",
        "last_turn",
        [USER, REPLY, MORE, says("4.")],
        [f"{LLAMA_SYSTEM}{LLAMA_ASK}{LLAMA_HEAD}[[2.<|eot_id|>]]{LLAMA_MORE}{LLAMA_HEAD}[[4.<|eot_id|>]]"],
    ),
    # Thinking on, in a field or in the content.
    ("qwen3", "last_turn", [MORE, THOUGHT], [f"{ASK_MORE}{HEAD}[[<think>\neasy\n</think>\n\n4.<|im_end|>]]"]),
    ("qwen3", "last_turn", [MORE, IN_CONTENT], [f"{ASK_MORE}{HEAD}[[<think>\neasy\n</think>\n\n4.<|im_end|>]]"]),
    ("qwen3_5", "last_turn", [MORE, THOUGHT], [f"{ASK_MORE}{HEAD}<think>\n[[easy\n</think>\n\n4.<|im_end|>]]"]),
    ("qwen3_6", "last_turn", [MORE, IN_CONTENT], [f"{ASK_MORE}{HEAD}<think>\n[[easy\n</think>\n\n4.<|im_end|>]]"]),
    # Thinking that the prompt had opened already.
    (
        "qwen3_6",
        "last_turn",
        [MORE, says("easy\n</think>\n\n4.")],
        [f"{ASK_MORE}{HEAD}<think>\n[[easy\n</think>\n\n4.<|im_end|>]]"],
    ),
    # Thinking off, or empty: the template supplies the empty pair.
    ("qwen3", "last_turn", [USER, REPLY], [f"{ASK}{HEAD}{NO_THOUGHT}[[2.<|im_end|>]]"]),
    ("qwen3_6", "last_turn", [USER, REPLY], [f"{ASK}{HEAD}{NO_THOUGHT}[[2.<|im_end|>]]"]),
    ("qwen3_6", "last_turn", [USER, says(f"{NO_THOUGHT}2.")], [f"{ASK}{HEAD}{NO_THOUGHT}[[2.<|im_end|>]]"]),
    # A history turn without thinking: the model would have generated it after an empty pair.
    (
        "qwen3_6",
        "last_turn",
        [USER, REPLY, MORE, THOUGHT],
        [f"{ASK}{HEAD}2.<|im_end|>\n{ASK_MORE}{HEAD}<think>\n[[easy\n</think>\n\n4.<|im_end|>]]"],
    ),
    (
        "qwen3_6",
        "one_row_per_turn",
        [USER, REPLY, MORE, THOUGHT],
        [
            f"{ASK}{HEAD}2.<|im_end|>\n{ASK_MORE}{HEAD}<think>\n[[easy\n</think>\n\n4.<|im_end|>]]",
            f"{ASK}{HEAD}{NO_THOUGHT}[[2.<|im_end|>]]",
        ],
    ),
    # Thinking that the template drops from the history, and keeps when it is told to.
    (
        "qwen3",
        "one_row_per_turn",
        [MORE, THOUGHT, MORE, THOUGHT],
        [
            f"{ASK_MORE}{HEAD}4.<|im_end|>\n{ASK_MORE}{HEAD}[[<think>\neasy\n</think>\n\n4.<|im_end|>]]",
            f"{ASK_MORE}{HEAD}[[<think>\neasy\n</think>\n\n4.<|im_end|>]]",
        ],
    ),
    (
        "qwen3_6",
        "preserve",
        [MORE, THOUGHT, MORE, THOUGHT],
        [
            f"{ASK_MORE}{HEAD}<think>\n[[easy\n</think>\n\n4.<|im_end|>]]\n"
            f"{ASK_MORE}{HEAD}<think>\n[[easy\n</think>\n\n4.<|im_end|>]]"
        ],
    ),
    # A user's turn after the last reply is left out: the template would drop the thinking because of it.
    ("qwen3_5", "last_turn", [MORE, THOUGHT, asks("Bye")], [f"{ASK_MORE}{HEAD}<think>\n[[easy\n</think>\n\n4.<|im_end|>]]"]),
    # Marks in a user's text are text.
    (
        "smollm2",
        "last_turn",
        [asks("Explain <|im_start|>assistant\n<think>\nSure.<|im_end|> please"), REPLY],
        [f"{SMOL}<|im_start|>user\nExplain {HEAD}<think>\nSure.<|im_end|> please<|im_end|>\n{HEAD}[[2.<|im_end|>]]"],
    ),
    (
        "qwen3",
        "last_turn",
        [asks("Explain <|im_start|>assistant\n<think>\n please"), THOUGHT],
        [f"<|im_start|>user\nExplain {HEAD}<think>\n please<|im_end|>\n{HEAD}[[<think>\neasy\n</think>\n\n4.<|im_end|>]]"],
    ),
    # Marks in the answer are the answer.
    (
        "qwen3",
        "last_turn",
        [USER, says("The tag `</think>` closes it.")],
        [f"{ASK}{HEAD}{NO_THOUGHT}[[The tag `</think>` closes it.<|im_end|>]]"],
    ),
    (
        "qwen3_6",
        "last_turn",
        [USER, {**THOUGHT, "content": "`<think>` opens, `</think>` closes."}],
        [f"{ASK}{HEAD}<think>\n[[easy\n</think>\n\n`<think>` opens, `</think>` closes.<|im_end|>]]"],
    ),
    ("smollm2", "last_turn", [USER, says("a<|im_end|>b")], [f"{SMOL}{ASK}{HEAD}[[a<|im_end|>b<|im_end|>]]"]),
    # White space at the edges: shown as it is, or not supervised.
    ("smollm2", "last_turn", [USER, says("  x = 1\n")], [f"{SMOL}{ASK}{HEAD}[[  x = 1\n<|im_end|>]]"]),
    ("smollm2", "last_turn", [USER, says("\n\nnew")], [f"{SMOL}{ASK}{HEAD}[[\n\nnew<|im_end|>]]"]),
    ("qwen3_6", "last_turn", [USER, says("  x = 1")], []),
    ("llama3", "last_turn", [USER, says("  x = 1")], []),
    # Tokens at the boundary that other scripts make.
    ("qwen3_6", "last_turn", [USER, says("你好，世界🙂")], [f"{ASK}{HEAD}{NO_THOUGHT}[[你好，世界🙂<|im_end|>]]"]),
    ("smollm2", "last_turn", [USER, says("🙂 é 你")], [f"{SMOL}{ASK}{HEAD}[[🙂 é 你<|im_end|>]]"]),
    ("llama3", "last_turn", [USER, says("नमस्ते 👩‍👩‍👧")], [f"{LLAMA_SYSTEM}{LLAMA_ASK}{LLAMA_HEAD}[[नमस्ते 👩‍👩‍👧<|eot_id|>]]"]),
    # Two replies in a row, and one that nobody asked for.
    ("smollm2", "last_turn", [USER, REPLY, says("4.")], [f"{SMOL}{ASK}{HEAD}[[2.<|im_end|>]]\n{HEAD}[[4.<|im_end|>]]"]),
    ("smollm2", "last_turn", [REPLY, USER, says("4.")], [f"{SMOL}{HEAD}2.<|im_end|>\n{ASK}{HEAD}[[4.<|im_end|>]]"]),
    # A system turn only.
    ("smollm2", "last_turn", [SYSTEM, REPLY], [f"<|im_start|>system\nBe brief.<|im_end|>\n{HEAD}[[2.<|im_end|>]]"]),
    ("qwen3", "last_turn", [SYSTEM, REPLY], [f"<|im_start|>system\nBe brief.<|im_end|>\n{HEAD}[[2.<|im_end|>]]"]),
    ("qwen3", "last_turn", [SYSTEM], []),
    # A developer's turn that the template shows.
    ("smollm2", "last_turn", [{**SYSTEM, "role": "developer"}, USER, REPLY], [f"{SMOL}<|im_start|>developer\nBe brief.<|im_end|>\n{ASK}{HEAD}[[2.<|im_end|>]]"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "policy", "messages", "expected"), GOLDEN)
def test_golden(load: Load, name: str, policy: Any, messages: list[dict[str, Any]], expected: list[str]) -> None:
    tokenizer = load(name)
    assert [marked(tokenizer, row) for row in ReplyFinder(tokenizer, policy).rows(messages)] == expected


QWEN3_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
QWEN3_6_CALL = "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
RESPONSE = "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        # In one row: the call is after the last question, where its thinking is kept.
        (
            "qwen3",
            {"x": 1},
            f"{ASK}{HEAD}[[<think>\ncall\n</think>\n\n{QWEN3_CALL}<|im_end|>]]\n{RESPONSE}"
            f"{HEAD}[[<think>\neasy\n</think>\n\n4.<|im_end|>]]",
        ),
        ("qwen3", '{"x": 1}', None),
        (
            "qwen3_6",
            {"x": 1},
            f"{ASK}{HEAD}<think>\n[[call\n</think>\n\n{QWEN3_6_CALL}<|im_end|>]]\n{RESPONSE}"
            f"{HEAD}<think>\n[[easy\n</think>\n\n4.<|im_end|>]]",
        ),
        ("qwen3_6", '{"x": 1}', None),
    ],
)
def test_tool_calls_with_results(load: Load, name: str, arguments: Any, expected: str | None) -> None:
    tokenizer = load(name)
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    messages = [USER, {**ASKED_TOOL, "tool_calls": [call], "reasoning_content": "call"}, RESULT, THOUGHT]
    (row,) = ReplyFinder(tokenizer).rows(messages, [TOOL])
    text = marked(tokenizer, row)
    if expected is None:  # JSON text of the arguments: the same as the mapping
        (same,) = ReplyFinder(tokenizer).rows(
            [USER, {**ASKED_TOOL, "reasoning_content": "call"}, RESULT, THOUGHT], [TOOL]
        )
        assert text == marked(tokenizer, same)
    else:
        system, _, rest = text.partition(ASK)
        assert '"name": "add"' in system
        assert f"{ASK}{rest}" == expected


def test_a_template_without_tools_shows_calls_as_text(load: Load) -> None:
    tokenizer = load("smollm2")
    (row,) = ReplyFinder(tokenizer).rows([USER, ASKED_TOOL, RESULT, REPLY], [TOOL])
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
    assert f"{HEAD}[[{call}<|im_end|>]]\n" in marked(tokenizer, row)
    assert marked(tokenizer, row).endswith(f"{HEAD}[[2.<|im_end|>]]")


def test_llama_calls_are_supervised_through_their_end(load: Load) -> None:
    tokenizer = load("llama3")
    (row,) = ReplyFinder(tokenizer).rows([USER, ASKED_TOOL, RESULT, REPLY], [TOOL])
    assert '[[{"name": "add", "parameters": {"x": 1}}<|eot_id|>]]' in marked(tokenizer, row)


@pytest.mark.parametrize(
    ("name", "messages", "error", "told"),
    [
        ("qwen3_6", [SYSTEM, REPLY], chat.RenderingError, "No user query"),
        ("qwen3_6", [{**SYSTEM, "role": "developer"}, USER, REPLY], chat.RenderingError, "Unexpected message role"),
        ("qwen3", [{**SYSTEM, "role": "developer"}, USER, REPLY], RejectedError, "message_not_shown"),
        ("smollm2", [USER, THOUGHT], RejectedError, "thinking_not_shown"),
    ],
)
def test_what_the_template_would_leave_out_is_rejected(
    load: Load, name: str, messages: list[dict[str, Any]], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        ReplyFinder(load(name)).rows(messages)


@pytest.mark.parametrize(
    ("name", "messages", "skipped"),
    [
        ("qwen3_6", [USER, REPLY, MORE, THOUGHT], {"history_changed": 1}),
        ("qwen3_6", [USER, says(" 2.")], {"altered": 1}),
        ("smollm2", [REPLY, USER, REPLY], {"no_prompt": 1}),
        ("smollm2", [USER, says("\n\nnew"), MORE, REPLY], {"boundary": 1}),
        ("smollm2", [USER, REPLY, MORE, REPLY], {}),
    ],
)
def test_replies_that_stay_context_are_counted(
    load: Load, name: str, messages: list[dict[str, Any]], skipped: dict[str, int]
) -> None:
    finder = ReplyFinder(load(name))
    finder.rows(messages)
    assert finder.skipped == skipped


def test_thinking_is_preserved_only_where_the_template_can(load: Load) -> None:
    with pytest.raises(UserError, match="no preserve_thinking"):
        ReplyFinder(load("qwen3"), "preserve")


def test_the_ids_are_those_of_the_rendered_text(load: Load) -> None:
    for name in ("smollm2", "qwen3", "qwen3_6", "llama3"):
        tokenizer = load(name)
        messages = [USER, {**REPLY, "reasoning_content": ""}, MORE, says("四. 🙂")]
        (row,) = ReplyFinder(tokenizer).rows(messages)
        whole = chat.render(tokenizer, messages, add_generation_prompt=False)
        assert row.input_ids == whole[: len(row.input_ids)]
        assert len(whole) - len(row.input_ids) <= 1


PARTS = [
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|eot_id|>",
    "\n",
    "\n\n",
    " ",
    "  ",
    "x",
    "The tag",
    "你好",
    "é",
    "é",
    "🙂",
    "1",
]


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "qwen3_6", "llama3"])
def test_pieces_have_the_ids_of_the_whole_text(load: Load, name: str) -> None:
    tokenizer = load(name)
    encoder = PieceEncoder(tokenizer)
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice(PARTS) for _ in range(draw.randrange(30)))
        pieces = encoder.split(text)
        assert "".join(pieces) == text
        ids = [token for piece in encoder.encode(pieces) for token in piece]
        assert ids == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "qwen3_6", "llama3"])
@pytest.mark.parametrize("policy", ["last_turn", "one_row_per_turn"])
def test_places_looked_up_are_the_places_measured(load: Load, name: str, policy: Any) -> None:
    tokenizer = load(name)
    looked_up, measured = ReplyFinder(tokenizer, policy), ReplyFinder(tokenizer, policy, exact=True)
    draw = random.Random(1)
    for _ in range(150):
        messages = []
        for _ in range(draw.randrange(1, 4)):
            messages += [asks("".join(draw.choices(PARTS, k=3))), says("".join(draw.choices(PARTS, k=3)))]
            if draw.random() < 0.3 and name.startswith("qwen"):
                messages[-1]["reasoning_content"] = "".join(draw.choices(PARTS, k=2))
        results = []
        for finder in (looked_up, measured):
            try:
                results.append(finder.rows(messages))
            except (chat.RenderingError, RejectedError) as error:
                results.append(str(error))
        assert results[0] == results[1]
    assert looked_up.skipped == measured.skipped


def test_only_so_many_layouts_are_remembered_and_those_in_use_first(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.tokenizer.replies.REMEMBERED_LAYOUTS", 3)
    finder, measured = ReplyFinder(load("qwen3_6")), 0
    measure = finder._measure

    def counted(*arguments: Any) -> Any:
        nonlocal measured
        measured += 1
        return measure(*arguments)

    monkeypatch.setattr(finder, "_measure", counted)
    usual = [USER, REPLY]
    expected = [finder.rows(usual), finder.rows(usual)][0]
    for turns in range(2, 7):
        finder.rows(usual * turns)
        assert finder.rows(usual) == expected
        assert len(finder._layouts) <= 3
    # The usual one at its first, second and fifth use, and each of the others once.
    assert measured == 3 + 5


def test_a_template_that_goes_by_the_words_of_the_history_is_found_out(load: Load) -> None:
    tokenizer = load("smollm2")
    odd = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if not loop.last and 'secret' in m.content %}hidden{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    before, tokenizer.chat_template = tokenizer.chat_template, odd
    try:
        finder = ReplyFinder(tokenizer)
        finder.rows([USER, REPLY, MORE, REPLY])
        with pytest.raises(UserError, match="places the replies of two conversations of one layout differently"):
            finder.rows([USER, says("secret"), MORE, REPLY])
    finally:
        tokenizer.chat_template = before


@pytest.fixture(scope="session")
def load(target_path: Path) -> Load:
    loaded: dict[str, PreTrainedTokenizerBase] = {}

    def load(name: str) -> PreTrainedTokenizerBase:
        if name not in loaded:
            folder = target_path if name == "smollm2" else Path(__file__).parents[3] / "var" / "tokenizers" / name
            if not folder.is_dir():
                pytest.fail(f"no tokenizer at {folder}: run `make tokenizers`")
            loaded[name] = chat.load_tokenizer(folder)
        return loaded[name]

    return load
