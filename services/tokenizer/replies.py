"""Where the replies of a conversation lie in its rendering, in token ids.

A reply begins where the rendering up to it, with the generation prompt, ends; and it ends after its end-of-turn
token. It may be supervised in a rendering only if both renderings of the shorter conversation, up to the reply and
through it, are beginnings of that rendering: then the model would have generated these ids after exactly these.

Rendering every beginning costs the square of the turns. So places are measured once for each layout, which is the
messages' roles and fields and the rendering's added tokens in their order, and are looked up from then on; the 2nd,
5th, 17th, 65th ... conversation of a layout is measured again to be sure. `exact` measures all.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from services import chat
from services.errors import UserError
from services.tokenizer.conversations import QUESTION, Normalizer
from services.tokenizer.encoding import PieceEncoder

# Long sessions of agents have one each: of sixty messages, 4096 take 150 MB.
REMEMBERED_LAYOUTS = 4096

# What becomes of thinking that the template drops from the history.
Thinking = Literal["last_turn", "one_row_per_turn", "preserve"]


class Place(NamedTuple):
    """A reply in a list of pieces: from within piece `begin`, after `header`, up to but without piece `end`."""

    turn: int
    begin: int
    header: str
    end: int


class Layout(NamedTuple):
    """The replies that may be supervised, and why the others may not, by turn."""

    places: tuple[Place, ...]
    refused: tuple[tuple[int, str], ...]


class TextRow(NamedTuple):
    """A sample: both lists have one entry a token; `supervised` are the turns with mask 1."""

    input_ids: list[int]
    loss_mask: list[int]
    supervised: tuple[int, ...]


class RejectedError(Exception):
    """A conversation that cannot be shown as it is, in few words to be counted by."""


@dataclass
class ReplyFinder:
    """Makes rows of conversations.

    Args:
        thinking_policy: `last_turn`: one row; a reply that the history shows otherwise than it was generated is
            context. `one_row_per_turn`: such a reply gets a row of its own, which ends with it. `preserve`: the
            template is told to keep all thinking.
        thinking: the template's `enable_thinking` when the replies were generated; None: a reply without thinking
            was generated with it off, if the template says so in its prompt.
        exact: measure every conversation.
    """

    tokenizer: PreTrainedTokenizerBase
    thinking_policy: Thinking = "last_turn"
    thinking: bool | None = None
    exact: bool = False
    skipped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.encoder = PieceEncoder(self.tokenizer)
        self._normalize = Normalizer(self.tokenizer)
        self._layouts: dict[Any, tuple[Layout, int]] = {}
        self._modes = (
            [None, False] if self.thinking is None and chat.takes_thinking(self.tokenizer) else [self.thinking]
        )
        self._options: dict[str, Any] = {"preserve_thinking": True} if self.thinking_policy == "preserve" else {}
        if self._options and not self._preserves():
            raise UserError("the template has no preserve_thinking; take the policy last_turn or one_row_per_turn")

    def rows(self, messages: Sequence[chat.Message], tools: Sequence[chat.Tool] = ()) -> list[TextRow]:
        """The samples of a conversation, the longest first; every reply is supervised in at most one of them.

        Replies that are supervised nowhere are counted in `skipped` by reason: `history_changed` (shown otherwise
        than generated), `altered` (the template does not show its text as it is), `boundary` (its first token merges
        with the prompt's last) and `no_prompt` (the template cannot ask for it).

        Raises:
            RenderingError: the template refuses the conversation.
            RejectedError: `message_not_shown`, `thinking_not_shown`: the template leaves something out; `not_utf8`: a
                text has half of a surrogate pair, which no tokenizer takes.
        """
        messages, tools = self._normalize(messages, tools)
        waiting = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        rows: list[TextRow] = []
        refused: dict[int, str] = {}
        while waiting:
            row, reasons = self._row(messages[: waiting[-1] + 1], tools, set(waiting))
            last = waiting[-1]
            if row.supervised:
                rows.append(row)
            refused |= reasons
            # The last turn of a row has had its chance.
            waiting = [turn for turn in waiting if turn not in row.supervised and turn != last]
            if self.thinking_policy != "one_row_per_turn":
                break
        supervised = {turn for row in rows for turn in row.supervised}
        self.skipped.update(reason for turn, reason in refused.items() if turn not in supervised)
        return rows

    def _row(
        self, messages: list[chat.Message], tools: list[chat.Tool], wanted: set[int]
    ) -> tuple[TextRow, dict[int, str]]:
        """A row of a conversation that ends with a reply."""
        whole = self._render(messages, tools)
        if not _is_utf8(whole):
            raise RejectedError("not_utf8")
        self._check_shown(messages, whole)
        pieces = self.encoder.split(whole)
        layout = self._layout(messages, tools, whole, pieces)
        refused = dict(layout.refused)
        ids = self.encoder.encode(pieces)
        begins: dict[int, int] = {}
        for place in layout.places:
            if place.turn not in wanted:
                continue
            if not self._is_verbatim(messages[place.turn], pieces, place):
                refused[place.turn] = "altered"
                continue
            (header,) = self.encoder.encode([place.header]) if place.header else ([],)
            if ids[place.begin][: len(header)] != header:
                if place.turn != len(messages) - 1:
                    refused[place.turn] = "boundary"
                    continue
                # After a prompt that ends here, these are the ids that are generated.
                ids[place.begin] = header + self.encoder.encode([pieces[place.begin][len(place.header) :]])[0]
            begins[place.turn] = len(header)
        return self._masked(ids, [place for place in layout.places if place.turn in begins], begins), refused

    def _masked(self, ids: list[list[int]], places: list[Place], begins: dict[int, int]) -> TextRow:
        # What the template puts after the last end of turn is never generated, and nothing follows it.
        end = places[-1].end if places else len(ids)
        input_ids = [token for piece in ids[:end] for token in piece]
        mask = [0] * len(input_ids)
        starts = [0]
        for piece in ids[:end]:
            starts.append(starts[-1] + len(piece))
        for place in places:
            begin = starts[place.begin] + begins[place.turn]
            mask[begin : starts[place.end]] = [1] * (starts[place.end] - begin)
        return TextRow(input_ids, mask, tuple(place.turn for place in places))

    def _layout(self, messages: list[chat.Message], tools: list[chat.Tool], whole: str, pieces: list[str]) -> Layout:
        if self.exact:
            return self._measure(messages, tools, whole, pieces)
        added = self.encoder.ids
        key = (
            tuple(self._shape(message) for message in messages),
            bool(tools),
            tuple(piece if piece in added else "" for piece in pieces),
        )
        layout, uses = self._layouts.pop(key, (None, 0))  # and back to the end: the first was not used for longest
        if layout is None or _is_power_of_four(uses) or not _fits(layout, pieces):
            measured = self._measure(messages, tools, whole, pieces)
            if layout is not None and _fits(layout, pieces) and measured != layout:
                raise UserError(
                    "the template places the replies of two conversations of one layout differently; measure every "
                    "one of them (exact)"
                )
            layout = measured
        if len(self._layouts) >= REMEMBERED_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[key] = (layout, uses + 1)
        return layout

    def _measure(self, messages: list[chat.Message], tools: list[chat.Tool], whole: str, pieces: list[str]) -> Layout:
        """Find every reply by rendering the conversation up to it and through it."""
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + len(piece))
        places, refused = [], []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            befores = self._prompts(messages[:turn], tools)
            through = whole if turn == len(messages) - 1 else self._render(messages[: turn + 1], tools)
            end = _end_of_turn(self.encoder, through)
            begin = max((len(before) for before in befores if whole.startswith(before)), default=None)
            if not befores:
                refused.append((turn, "no_prompt"))
            elif begin is None or begin >= end or not whole.startswith(through[:end]):
                refused.append((turn, "history_changed"))
            else:
                # The piece that the prompt ends in, whatever the reply begins with.
                first = next(number for number in range(len(pieces)) if ends[number + 1] >= begin)
                last = ends.index(end)
                places.append(Place(turn, first, whole[ends[first] : begin], last))
        return Layout(tuple(places), tuple(refused))

    def _shape(self, message: chat.Message) -> tuple[Any, ...]:
        """What of a message a template may go by."""
        content, reasoning = message["content"], message.get("reasoning_content", "")
        return (
            message["role"],
            _edges(content),
            _edges(reasoning),
            self.encoder.added_in(content),
            self.encoder.added_in(reasoning),
            len(message.get("tool_calls") or ()),
            tuple(message),
        )

    def _prompts(self, messages: list[chat.Message], tools: list[chat.Tool]) -> list[str]:
        """The prompts that may have asked for the next reply: with thinking, and without."""
        prompts = []
        for mode in self._modes if messages else []:
            try:
                prompt = chat.render_text(
                    self.tokenizer, messages, tools, mode, add_generation_prompt=True, **self._options
                )
            except chat.RenderingError:
                continue
            prompts.append(prompt)
        return prompts

    def _render(self, messages: list[chat.Message], tools: list[chat.Tool]) -> str:
        return chat.render_text(self.tokenizer, messages, tools, self.thinking, **self._options)

    def _check_shown(self, messages: list[chat.Message], whole: str) -> None:
        position = 0
        for message in messages[:-1]:
            if message["role"] not in ("system", "developer", "user"):
                continue
            content = message["content"].strip()
            found = whole.find(content, position)
            if found < 0 and (found := whole.find(content)) < 0:
                raise RejectedError("message_not_shown")
            position = found + len(content)
        if messages[-1].get("reasoning_content", "").strip() not in whole:
            raise RejectedError("thinking_not_shown")

    def _is_verbatim(self, message: chat.Message, pieces: list[str], place: Place) -> bool:
        reply = "".join(pieces[place.begin : place.end])[len(place.header) :]
        return message["content"] in reply and message.get("reasoning_content", "").strip("\n") in reply

    def _preserves(self) -> bool:
        thought = {"role": "assistant", "content": "Hi", "reasoning_content": "considered"}
        shown = [
            chat.render_text(self.tokenizer, [QUESTION, thought, QUESTION], None, None, **options)
            for options in ({}, self._options)
        ]
        return shown[0] != shown[1]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_power_of_four(number: int) -> bool:
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1


def _edges(text: str) -> tuple[str, ...]:
    """The white space at a text's edges, which templates strip; one of nothing else is all edge."""
    inner = text.strip()
    if not inner:
        return (text,)
    begin = len(text) - len(text.lstrip())
    return text[:begin], text[begin + len(inner) :]


def _fits(layout: Layout, pieces: list[str]) -> bool:
    return all(pieces[place.begin].startswith(place.header) for place in layout.places)


def _end_of_turn(encoder: PieceEncoder, text: str) -> int:
    """Just after the last special token, which closes the turn; the whole length when there is none."""
    end = len(text)
    for piece in reversed(encoder.split(text)):
        if piece in encoder.special:
            return end
        end -= len(piece)
    return len(text)
