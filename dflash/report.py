"""The acceptance report: counts over decoded prompts, and the check against the target alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from dflash.acceptance import CANDIDATES

# A greedy answer of a small model often ends in a loop, which a drafter guesses too easily.
LOOP_TAIL = 24
LOOP_PERIOD = 8
THINKING = {True: "on", False: "off", None: "not set"}

DEFINITIONS = {
    "acceptance_length": (
        "tokens kept from verifications / verifications of the target, the bonus token counted and the first "
        "token of an answer (it comes from the prompt's pass) not; tokens after an end token or the length "
        "limit are not kept; 1.0 means no guess was ever right"
    ),
    "acceptance_by_position": "entry k - 1: share of verifications in which guesses 1 to k were all kept",
    "tokens_per_target_call": "produced tokens / passes of the target, the prompts' own passes counted",
    "tokens_per_second": "produced tokens / seconds of decoding in batches, the prompts' own passes included",
    "target_alone_tokens_per_second": "the same for the target without a drafter, in the same batches",
    "degenerate": f"answers whose last {LOOP_TAIL} tokens repeat with a period of at most {LOOP_PERIOD}",
    "recall": (
        f"share of all guesses, from every token of the target's own answers, whose {CANDIDATES} likeliest tokens hold "
        "the answer's"
    ),
    "oracle_length": (
        f"what choosing rightly among the {CANDIDATES} likeliest tokens of each guess would reach, as "
        "acceptance_length counts, mean over every token of the target's own answers"
    ),
    "tree": "the same prompts decoded greedily with a draft tree of tree_budget nodes a pass, one prompt at a time",
    "lossless": "every produced token equals what the target alone produces with its own cache, greedily",
    "numeric_ties": (
        "prompts whose first difference is where the target's two best logits are closer than tie_gap; the "
        "tokens after it are not compared"
    ),
}

# A prompt's decoding record and the target's own rollout, as `dflash.evaluate` stores them.
Pair = tuple[dict[str, Any], dict[str, Any]]


class Difference(NamedTuple):
    """The first position where an answer leaves the target's own, and the target's logit gap there."""

    position: int
    gap: float


def build_report(pairs: list[Pair], block_size: int, tie_gap: float) -> dict[str, Any]:
    """Return the report as JSON values.

    Args:
        pairs: of each prompt; without "gaps" in the rollouts the tokens were sampled, and are not compared.
        block_size: rows of the drafter's block.
        tie_gap: largest logit gap that counts as a numeric tie.
    """

    def parts(name: str, label: dict[Any, str] | None = None) -> dict[str, Any]:
        groups: dict[str, list[Pair]] = {}
        for pair in pairs:
            value = pair[0][name]
            groups.setdefault(label[value] if label else value, []).append(pair)
        return {group: summarize(groups[group], block_size) for group in sorted(groups)}

    report = {
        "definitions": DEFINITIONS,
        "overall": summarize(pairs, block_size),
        "by_source": parts("source"),
        "by_thinking": parts("thinking", THINKING),
        "lossless": compare(pairs, tie_gap),
    }
    trees = [({**record, **record["tree"]}, rollout) for record, rollout in pairs if record["tree"]]
    return report | ({"tree_lossless": compare(trees, tie_gap)} if trees else {})


def summarize(pairs: list[Pair], block_size: int) -> dict[str, Any]:
    """Return counts and ratios over some prompts, as defined in DEFINITIONS; None where there is nothing to divide."""
    counted = [record["counted"] for record, _ in pairs]
    guesses, starts = sum(c["guesses"] for c in counted), sum(c["starts"] for c in counted)
    records = [record for record, _ in pairs]
    alone_tokens = sum(len(rollout["tokens"]) for _, rollout in pairs)
    summary = {
        "prompts": len(pairs),
        **_decoded(records, block_size),
        "degenerate": sum(is_degenerate(record["tokens"]) for record in records),
        "target_alone_tokens_per_second": alone_tokens / max(sum(rollout["seconds"] for _, rollout in pairs), 1e-9),
        "recall": sum(c["near"] for c in counted) / guesses if guesses else None,
        "oracle_length": sum(c["oracle"] for c in counted) / starts if starts else None,
    }
    trees = [record["tree"] for record in records if record["tree"]]
    return summary | ({"tree": _decoded(trees, block_size)} if trees else {})


def _decoded(records: list[dict[str, Any]], block_size: int) -> dict[str, Any]:
    lengths = [length for record in records for length in record["acceptance_lengths"]]
    tokens = sum(len(record["tokens"]) for record in records)
    seconds = [record["seconds"] for record in records]
    verifications = max(len(lengths), 1)
    return {
        "tokens": tokens,
        "verifications": len(lengths),
        "acceptance_length": sum(lengths) / verifications if lengths else None,
        "acceptance_by_position": [
            round(sum(length > k for length in lengths) / verifications, 4) for k in range(1, block_size)
        ],
        "tokens_per_target_call": tokens / (len(lengths) + len(records)),
        "tokens_per_second": None if None in seconds else tokens / max(sum(seconds), 1e-9),
    }


def compare(pairs: list[Pair], tie_gap: float) -> dict[str, Any]:
    """Compare every answer with the target's own, up to its first difference; of sampled ones nothing is compared."""
    compared = 0
    mismatches: list[dict[str, Any]] = []
    ties: list[dict[str, Any]] = []
    for record, rollout in pairs:
        if "gaps" not in rollout:
            continue
        difference = first_difference(record["tokens"], rollout["tokens"], rollout["gaps"])
        compared += len(rollout["tokens"]) if difference is None else difference.position
        if difference is not None:
            named = {"prompt_id": record["prompt_id"], **difference._asdict()}
            (ties if difference.gap < tie_gap else mismatches).append(named)
    return {
        "lossless": not mismatches if compared or mismatches else None,
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
