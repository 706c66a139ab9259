"""The user's words are found again in a rendered prompt, whatever the template."""

from pathlib import Path

import pytest

from services import chat
from services.prompts.text import user_text
from services.prompts.user_turns import turn_marks, user_text_of

TOKENIZERS = Path(__file__).parents[3] / "var" / "tokenizers"
MESSAGES = [
    {"role": "system", "content": "Answer the user briefly."},
    {"role": "user", "content": "How many miles\nis it to Babylon?"},
    {"role": "assistant", "content": "Three score and ten."},
    {"role": "user", "content": "人家说去那里 🕯️ can be done by candle-light?"},
]


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "qwen3_5", "qwen3_6", "llama3"])
def test_user_turns_come_back_from_token_ids(name: str, target_path: Path) -> None:
    tokenizer = chat.load_tokenizer(target_path if name == "smollm2" else TOKENIZERS / name)
    marks = turn_marks(tokenizer)
    assert marks is not None
    for messages in (MESSAGES, MESSAGES[1:], MESSAGES[:2], MESSAGES[1:2]):
        assert user_text_of(tokenizer, marks, chat.render(tokenizer, messages)) == user_text(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        "{% if messages[1:] %}{{ raise_exception('one question only') }}{% endif %}{{ messages[0].content }}",
    ],
)
def test_a_template_that_shows_no_turns_has_no_marks(target_path: Path, template: str) -> None:
    tokenizer = chat.load_tokenizer(target_path)
    tokenizer.chat_template = template
    assert turn_marks(tokenizer) is None
