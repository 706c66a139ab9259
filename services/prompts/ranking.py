"""The order in which a source's rows are taken: fixed by the seed and their content.

A row's rank is a keyed hash of its conversation. So the order of the files and the number of processes do not
matter, and a raised quota keeps all earlier prompts. Rows that share a group take turns: the first of every group
by rank, then the second of every group, and so on, so that rewrites of one question do not crowd out the others.
"""

import hashlib
import json
from collections.abc import Set
from typing import Any, NamedTuple

import numpy as np

from services.prompts.adapters import Conversation, Rejected

# A row's name is the first 128 bits of a hash of its content; `file` and `row` say where it stood.
RECORD = np.dtype([("high", "u8"), ("low", "u8"), ("rank", "u8"), ("group", "u8"), ("file", "u4"), ("row", "u4")])
Records = np.ndarray[Any, np.dtype[np.void]]
Indices = np.ndarray[Any, np.dtype[np.intp]]


class Ranked(NamedTuple):
    """Indices of the rows to take from, in order, and how many of the others there were by what they equal."""

    order: Indices
    duplicates: dict[str, int]


def prompt_id(conversation: Conversation) -> str:
    """A stable name of the content: equal messages and tools give equal ids, in whatever source.

    Raises:
        Rejected: the content cannot be written as JSON in UTF-8 (a lone surrogate, a Python object).
    """
    try:
        text = json.dumps([conversation.messages, conversation.tools], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]
    except UnicodeEncodeError:
        raise Rejected("not_utf8") from None
    except (TypeError, ValueError, RecursionError):
        raise Rejected("not_json") from None


def record(name: str, seed: int, group: str | None, file: int, row: int) -> tuple[int, ...]:
    """A row of RECORD."""
    number = int(name, 16)
    rank = _hash(f"{seed}:{name}")
    return number >> 64, number & (2**64 - 1), rank, rank if group is None else _hash(group), file, row


def name_of(row: np.void) -> str:
    return _name(int(row["high"]), int(row["low"]))


def ranked(records: Records, of_run: Set[str], of_corpus: Set[str], grouped: bool) -> Ranked:
    """Order a source's rows; of equal ones the first stays, and names that are taken already are left out."""
    by_name = np.lexsort((records["row"], records["file"], records["group"], records["low"], records["high"]))
    high, low = records["high"][by_name], records["low"][by_name]
    fresh = np.ones(len(records), bool)
    fresh[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    unique = by_name[fresh]
    names = map(_name, high[fresh].tolist(), low[fresh].tolist())
    equal = np.fromiter((_equal(name, of_run, of_corpus) for name in names), np.uint8, len(unique))
    rows = unique[equal == 0]
    turn = _turns(records[rows]) if grouped else np.zeros(len(rows), np.intp)
    order = np.lexsort((records["low"][rows], records["high"][rows], records["rank"][rows], turn))
    counts = {"in_source": len(records) - len(unique)}
    counts |= {name: int(np.sum(equal == code)) for code, name in enumerate(("in_other_source", "in_corpus"), start=1)}
    return Ranked(rows[order], {name: count for name, count in counts.items() if count})


def _name(high: int, low: int) -> str:
    return f"{high << 64 | low:032x}"


def _equal(name: str, of_run: Set[str], of_corpus: Set[str]) -> int:
    return 1 if name in of_run else 2 if name in of_corpus else 0


def _turns(records: Records) -> Indices:
    """How many rows of lower rank each row's group has."""
    by_group = np.lexsort((records["low"], records["high"], records["rank"], records["group"]))
    groups = records["group"][by_group]
    begins = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])[: len(groups)])
    sizes = np.diff([*begins, len(groups)])
    turns = np.empty(len(records), np.intp)
    turns[by_group] = np.arange(len(groups)) - np.repeat(begins, sizes)
    return turns


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
