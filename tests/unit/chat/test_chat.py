"""Token ids come from the target's own template."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from services import chat
from services.errors import UserError
from services.target import tokenizer_fingerprint

# Like Qwen3's: tools are shown, `enable_thinking` matters, and thinking is dropped from all but the last reply.
THINKING_TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% set content = message.content %}
{%- if message.role == 'assistant' and not loop.last %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

USER: chat.Message = {"role": "user", "content": "1+1?"}
TOOL: chat.Tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


@pytest.fixture
def make_target(target_path: Path, tmp_path: Path) -> Callable[[], Path]:
    """A copy of the target's folder without its weights."""

    def make() -> Path:
        folder = tmp_path / "target"
        shutil.copytree(target_path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        return folder

    return make


@pytest.fixture
def thinking_tokenizer(make_target: Callable[[], Path]) -> PreTrainedTokenizerBase:
    folder = make_target()
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return chat.load_tokenizer(folder)


def test_a_prompt_ends_where_the_reply_begins(tokenizer: PreTrainedTokenizerBase) -> None:
    text = tokenizer.decode(chat.render(tokenizer, [{"role": "system", "content": "Be brief."}, USER]))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_conversation_that_the_template_refuses_says_why(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(chat.RenderingError, match="NoneType"):
        chat.render(tokenizer, [{"role": "user", "content": None}])


def test_tools_and_thinking_reach_a_template_that_takes_them(thinking_tokenizer: PreTrainedTokenizerBase) -> None:
    assert chat.takes_tools(thinking_tokenizer)
    assert chat.takes_thinking(thinking_tokenizer)
    text = str(thinking_tokenizer.decode(chat.render(thinking_tokenizer, [USER], [TOOL], thinking=False)))
    assert '"name": "add"' in text
    assert text.endswith("<think>\n\n</think>\n\n")


def test_a_template_without_tools_gets_them_as_text(tokenizer: PreTrainedTokenizerBase) -> None:
    assert not chat.takes_tools(tokenizer)
    assert not chat.takes_thinking(tokenizer)
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    shown = chat.with_tools_as_text(messages, [TOOL])
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "tool"]
    assert shown[0]["content"].startswith("Be brief.\n\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in shown[0]["content"]
    assert shown[2] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>',
    }
    assert chat.with_tools_as_text([USER], [TOOL])[0]["role"] == "system"
    assert chat.with_tools_as_text([USER], None) == [USER]


def test_fingerprints_tell_templates_and_tokenizers_apart(
    tokenizer: PreTrainedTokenizerBase, thinking_tokenizer: PreTrainedTokenizerBase, target_path: Path, tmp_path: Path
) -> None:
    assert len(chat.template_fingerprint(tokenizer)) == 64
    assert chat.template_fingerprint(tokenizer) != chat.template_fingerprint(thinking_tokenizer)
    other = tmp_path / "target"
    assert tokenizer_fingerprint(target_path) == tokenizer_fingerprint(other)
    (other / "tokenizer.json").write_text("{}")
    assert tokenizer_fingerprint(target_path) != tokenizer_fingerprint(other)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: there is no such folder"):
        chat.load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("tokenizer.json", "no tokenizer.json"),
        ("chat_template.jinja", "no chat template"),
        ("config.json", "config.json cannot be read"),
    ],
)
def test_what_a_folder_lacks_is_named(make_target: Callable[[], Path], missing: str, told: str) -> None:
    folder = make_target()
    (folder / missing).unlink()
    with pytest.raises(UserError, match=told) as caught:
        chat.load_tokenizer(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_tokenizer_is_one_line(make_target: Callable[[], Path]) -> None:
    folder = make_target()
    (folder / "tokenizer.json").write_text('{"broken')
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        chat.load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(make_target: Callable[[], Path]) -> None:
    folder = make_target()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 1000}))
    with pytest.raises(UserError, match="49152 tokens and the model 1000 embeddings"):
        chat.load_tokenizer(folder)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for message in messages %}", "Unexpected end of template"),
        ("{{ raise_exception('a system prompt is needed') }}", "a system prompt is needed"),
    ],
)
def test_a_template_that_takes_no_question_is_told(make_target: Callable[[], Path], template: str, told: str) -> None:
    folder = make_target()
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=f"does not take even one question of a user: {told}") as caught:
        chat.load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_tools_gets_them_as_text(make_target: Callable[[], Path]) -> None:
    folder = make_target()
    refusing = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refusing + THINKING_TEMPLATE)
    assert not chat.takes_tools(chat.load_tokenizer(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_file_of_the_target_that_is_no_object_is_one_line(make_target: Callable[[], Path], name: str) -> None:
    folder = make_target()
    (folder / name).write_text("[]")
    with pytest.raises(UserError, match=r"^target model .*target: "):
        chat.load_tokenizer(folder)
