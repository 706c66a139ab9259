"""What the user says in a prompt of which only the token ids are left, such as one of an existing corpus."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from services import chat

FIRST, REPLY, LAST = "firstquestion", "firstanswer", "lastquestion"
TOOL_RESULT = "<tool_response>"


class TurnMarks(NamedTuple):
    """What the template writes before and after a user's turn."""

    opening: str
    closing: str


def turn_marks(tokenizer: PreTrainedTokenizerBase) -> TurnMarks | None:
    """The template's marks of a user turn, from the rendering of a known conversation; None where they do not show.

    They do not either in a template that refuses that conversation.
    """
    messages = [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": REPLY},
        {"role": "user", "content": LAST},
    ]
    try:
        text = chat.render_text(tokenizer, messages)
    except chat.RenderingError:
        return None
    if any(text.count(known) != 1 for known in (FIRST, REPLY, LAST)):
        return None
    before_first, rest = text.split(FIRST)
    after_first, rest = rest.split(REPLY)
    before_last, after_last = rest.split(LAST)
    closing = _common_beginning(after_first, after_last)
    # What ends the turn before is not part of what begins this one.
    opening = _common_beginning(before_first[::-1], before_last[::-1])[::-1].removeprefix(closing)
    return TurnMarks(opening, closing) if opening.strip() and closing.strip() else None


def user_text_of(tokenizer: PreTrainedTokenizerBase, marks: TurnMarks, input_ids: Sequence[int]) -> str:
    """The text of all user turns, as `text.user_text` gives it of messages; results of tools are none."""
    text = tokenizer.decode(input_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    turns = (turn.partition(marks.closing)[0] for turn in str(text).split(marks.opening)[1:])
    return "\n".join(turn for turn in turns if not turn.lstrip().startswith(TOOL_RESULT))


def _common_beginning(one: str, other: str) -> str:
    length = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    return one[: min(length, len(other))]
