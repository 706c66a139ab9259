"""The words of a prompt, by which prompts are compared with each other and with evaluation sets."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Chinese and Japanese are written without spaces: there each character is a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


def user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the user says: system prompts and answers are shared by prompts that ask different things."""
    return "\n".join(message["content"] for message in messages if message["role"] == "user")


def words(text: str) -> list[str]:
    """Words in lower case, without punctuation and white space."""
    return WORD.findall(text.lower())


def ngrams(sequence: Sequence[str], size: int) -> set[str]:
    """Every `size` words in a row; all of them together where there are fewer."""
    if len(sequence) < size:
        return {" ".join(sequence)} if sequence else set()
    return {" ".join(sequence[first : first + size]) for first in range(len(sequence) - size + 1)}
