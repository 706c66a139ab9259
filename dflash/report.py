"""The acceptance report: counts over decoded prompts, and the check against the target alone."""

from __future__ import annotations

from typing import Any, NamedTuple

# A greedy answer of a small model often ends in a loop, which a drafter guesses too easily.
LOOP_TAIL = 24
LOOP_PERIOD = 8

DEFINITIONS = {
    "acceptance_length": (
        "tokens kept from verifications / verifications of the target, the bonus token counted and the first "
        "token of an answer (it comes from the prompt's pass) not; tokens after an end token or the length "
        "limit are not kept; 1.0 means no guess was ever right"
    ),
    "acceptance_by_position": "entry k - 1: share of verifications in which guesses 1 to k were all kept",
    "tokens_per_second": "produced tokens / seconds of decoding in batches, the prompts' own passes included",
    "degenerate": f"answers whose last {LOOP_TAIL} tokens repeat with a period of at most {LOOP_PERIOD}",
    "lossless": "every produced token equals what the target alone produces with its own cache, greedily",
    "numeric_ties": (
        "prompts whose first difference is where the target's two best logits are closer than tie_gap; the "
        "tokens after it are not compared"
    ),
}


class Difference(NamedTuple):
    """The first position where an answer leaves the target's own, and the target's logit gap there."""

    position: int
    gap: float


def build_report(pairs: list[tuple[dict[str, Any], dict[str, Any]]], block_size: int, tie_gap: float) -> dict[str, Any]:
    """Return the report as JSON values.

    Args:
        pairs: each prompt's decoding record and the target's own rollout, as `dflash.evaluate` stores them.
        block_size: rows of the drafter's block.
        tie_gap: largest logit gap that counts as a numeric tie.
    """
    sources = sorted({record["source"] for record, _ in pairs})
    return {
        "definitions": DEFINITIONS,
        "overall": summarize(pairs, block_size),
        "by_source": {
            source: summarize([pair for pair in pairs if pair[0]["source"] == source], block_size) for source in sources
        },
        "lossless": compare(pairs, tie_gap),
    }


def summarize(pairs: list[tuple[dict[str, Any], dict[str, Any]]], block_size: int) -> dict[str, Any]:
    """Return counts and ratios over some prompts, as defined in DEFINITIONS."""
    lengths = [length for record, _ in pairs for length in record["acceptance_lengths"]]
    tokens = sum(len(record["tokens"]) for record, _ in pairs)
    alone_tokens = sum(len(rollout["tokens"]) for _, rollout in pairs)
    verifications = max(len(lengths), 1)
    return {
        "prompts": len(pairs),
        "tokens": tokens,
        "verifications": len(lengths),
        "acceptance_length": sum(lengths) / verifications if lengths else None,
        "acceptance_by_position": [
            round(sum(length > k for length in lengths) / verifications, 4) for k in range(1, block_size)
        ],
        "degenerate": sum(is_degenerate(record["tokens"]) for record, _ in pairs),
        "tokens_per_second": tokens / max(sum(record["seconds"] for record, _ in pairs), 1e-9),
        "target_alone_tokens_per_second": alone_tokens / max(sum(rollout["seconds"] for _, rollout in pairs), 1e-9),
    }


def compare(pairs: list[tuple[dict[str, Any], dict[str, Any]]], tie_gap: float) -> dict[str, Any]:
    """Compare every answer with the target's own, up to its first difference."""
    compared = 0
    mismatches: list[dict[str, Any]] = []
    ties: list[dict[str, Any]] = []
    for record, rollout in pairs:
        difference = first_difference(record["tokens"], rollout["tokens"], rollout["gaps"])
        compared += len(rollout["tokens"]) if difference is None else difference.position
        if difference is not None:
            named = {"prompt_id": record["prompt_id"], **difference._asdict()}
            (ties if difference.gap < tie_gap else mismatches).append(named)
    return {
        "lossless": not mismatches,
        "compared_tokens": compared,
        "mismatches": mismatches,
        "numeric_ties": ties,
        "tie_gap": tie_gap,
    }


def first_difference(tokens: list[int], own: list[int], gaps: list[float]) -> Difference | None:
    """Return where `tokens` leaves the target's `own` answer, or None when they are equal."""
    if tokens == own:
        return None
    position = next(
        (i for i, (ours, theirs) in enumerate(zip(tokens, own, strict=False)) if ours != theirs),
        min(len(tokens), len(own)),
    )
    return Difference(position, gaps[position] if position < len(gaps) else float("inf"))


def is_degenerate(tokens: list[int]) -> bool:
    """Return whether the answer ends in a loop (see DEFINITIONS)."""
    tail = tokens[-LOOP_TAIL:]
    if len(tail) < LOOP_TAIL:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1))
