"""The parity chain of one drafter and its target: what has to agree before a long run, and before serving.

Each link compares two ways to the same numbers, in fp32, on the target's own answers to a few prompts. A link that
fails says what differs; those after it are still run, as they tell where the fault is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from dflash.acceptance import Answer, count, guess_everywhere
from dflash.decode import DraftCache, block_hidden, greedy_decode, new_cache, speculative_decode, why_no_blocks
from dflash.errors import DflashError
from dflash.export import check_pair, find_draft, load_draft
from dflash.forward import forward_blocks
from dflash.model import DraftModel
from dflash.pack import build_pack
from dflash.report import first_difference
from dflash.rollouts import check_ids, read_prompts
from dflash.serving import ask_server
from dflash.target import Target, capture, capture_with_final, forward_with_cache, load_target

# Largest difference of two ways to one fp32 tensor, as a share of its largest value.
TOLERANCE = 1e-3
# Where the target's two best logits are closer than this, two passes may choose differently.
TIE_GAP = 1e-3
# Largest difference between the verifications that a server made and those counted here, as a share of them.
SERVED_TOLERANCE = 0.03
AT_ONCE = 8
# Blocks of an answer that are drafted both ways.
BLOCKS = 8
QUESTIONS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time, there was a small fox who")


@dataclass(frozen=True)
class Link:
    """One line of the chain: what has to agree, whether it does (None: cannot be checked), and by how much or why."""

    name: str
    holds: bool | None
    detail: str


@dataclass(frozen=True)
class _Case:
    """What the links look at: a pair, and the target's own answers."""

    target: Target
    draft: DraftModel
    folder: Path
    answers: list[Answer]
    gaps: list[list[float]]

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.architecture.target_layer_ids

    def ids(self, answer: Answer) -> Tensor:
        return torch.tensor([answer.prompt_ids + answer.tokens], device=self.target.device)


def verify(
    draft: Path,
    target: Path,
    prompts: list[list[int]],
    max_new_tokens: int,
    device: str = "cpu",
    server: str | None = None,
) -> Iterator[Link]:
    """Yield each link of the chain as it is measured.

    Args:
        draft: a drafter folder, a checkpoint or a run.
        target: Hugging Face folder of the target.
        prompts: token ids of each prompt.
        max_new_tokens: most tokens of the target's answer to each, which all links are measured on.
        device: a torch device.
        server: address of an SGLang server that decodes with this drafter; None: nothing is served.

    Raises DflashError when target or drafter cannot be loaded, or every answer is a single token.
    """
    folder = find_draft(draft)
    loaded, model = load_target(target, torch.float32, device), load_draft(folder, device)
    check_ids(prompts, loaded)
    outputs = [greedy_decode(loaded, prompt, max_new_tokens) for prompt in prompts]
    answers = [(Answer(p, o.tokens), o.gaps) for p, o in zip(prompts, outputs, strict=True) if len(o.tokens) > 1]
    if not answers:
        raise DflashError(f"{target}: answers every prompt with a single token: give other prompts")
    case = _Case(loaded, model, folder, [answer for answer, _ in answers], [gaps for _, gaps in answers])
    yield _measure("the drafter fits the target", partial(_fits, case))
    yield _measure("features = hidden states after the tapped layers", partial(_features, case))
    yield _measure("head x last hidden state = the target's logits", partial(_head, case))
    yield _measure("training forward = cached decoding forward", partial(_forwards, case))
    reason = why_no_blocks(loaded)
    for name, link in (
        ("features with a cache = features without", _cached_features),
        ("tokens with the drafter = the target's own", _lossless),
        ("acceptance on cached answers = acceptance when decoding", _acceptance),
    ):
        yield _measure(name, partial(link, case)) if reason is None else Link(name, None, reason)
    if server is not None:
        for at_once, words in ((1, "one request at a time"), (AT_ONCE, f"{AT_ONCE} at once")):
            served = partial(_served, case, server, prompts, max_new_tokens, at_once)
            yield _measure(f"the server's acceptance = acceptance counted on its answers, {words}", served)


def prompts_to_verify(target: Path, path: Path | None) -> list[list[int]]:
    """Return the ids of the prompts in the JSONL file `path`, or of a few questions in the target's own tokens.

    Raises DflashError for a file that cannot be read, or when neither a file nor a tokenizer is there.
    """
    if path is not None:
        return [prompt.input_ids for prompt in read_prompts(path)]
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DflashError(f"{target}: no tokenizer here to make prompts with: give a file with --prompts") from error
    prompts = [tokenizer(question)["input_ids"] for question in QUESTIONS]
    # Without its files transformers makes a tokenizer that knows no token.
    if not all(prompts):
        raise DflashError(f"{target}: its tokenizer has no tokens for a question: give a file with --prompts")
    return prompts


def _measure(name: str, link: Callable[[], str]) -> Link:
    try:
        return Link(name, True, link())
    except DflashError as error:
        return Link(name, False, str(error))


def _fits(case: _Case) -> str:
    shape = case.draft.architecture
    check_pair(shape, case.target.fit, str(case.folder))
    sliding = sum(window is not None for window in shape.windows)
    windows = f", {sliding} of {shape.num_layers} layers with a window of {shape.sliding_window}" if sliding else ""
    return (
        f"{len(case.draft.state_dict())} tensors, taps {list(shape.target_layer_ids)} of {shape.num_target_layers} "
        f"layers, rope theta {shape.rope_theta:g}, mask token {shape.mask_token_id}, block size "
        f"{shape.block_size}{windows}"
    )


def _features(case: _Case) -> str:
    pairs = []
    for answer in case.answers:
        ids = case.ids(answer)
        with torch.no_grad():
            states = case.target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        pairs.append((capture(case.target, ids, case.taps), torch.cat([states[i + 1] for i in case.taps], dim=-1)))
    return _largest_difference(pairs)


def _head(case: _Case) -> str:
    pairs = []
    for answer in case.answers:
        ids = case.ids(answer)
        _, final = capture_with_final(case.target, ids, case.taps)
        with torch.no_grad():
            pairs.append((final @ case.target.head.T, case.target.model(input_ids=ids, use_cache=False).logits))
    return _largest_difference(pairs)


def _forwards(case: _Case) -> str:
    pairs = []
    for answer in case.answers:
        features = capture(case.target, case.ids(answer), case.taps)
        anchors = len(answer.prompt_ids) + np.arange(min(BLOCKS, len(answer.tokens)))
        with torch.no_grad():
            pack = build_pack([answer.sample], [anchors], case.target.device)
            trained = forward_blocks(case.draft, case.target, pack, features[0])
        for block, anchor in enumerate(anchors.tolist()):
            cache = DraftCache(case.draft)
            # The prompt's features first and then each verified token's, as when decoding.
            cache.append(features[:, : len(answer.prompt_ids)])
            for position in range(len(answer.prompt_ids), anchor):
                cache.append(features[:, position : position + 1])
            token = (answer.prompt_ids + answer.tokens)[anchor]
            pairs.append((trained[block], block_hidden(case.target, case.draft, token, cache)))
    return _largest_difference(pairs)


def _cached_features(case: _Case) -> str:
    pairs = []
    for answer in case.answers:
        ids, cache = case.ids(answer), new_cache(case.target)
        prompt, rest = ids[:, : len(answer.prompt_ids)], ids[:, len(answer.prompt_ids) :]
        found = [forward_with_cache(case.target, part, cache, case.taps).features for part in (prompt, rest)]
        pairs.append((torch.cat(found, dim=1), capture(case.target, ids, case.taps)))
    return _largest_difference(pairs)


def _lossless(case: _Case) -> str:
    tokens, ties = 0, 0
    for number, (answer, gaps) in enumerate(zip(case.answers, case.gaps, strict=True)):
        found = speculative_decode(case.target, case.draft, answer.prompt_ids, len(answer.tokens)).tokens
        difference = first_difference(found, answer.tokens, gaps)
        if difference is not None and difference.gap >= TIE_GAP:
            raise DflashError(
                f"answer {number} leaves the target's at token {difference.position}, where its two best logits are "
                f"{difference.gap:.3g} apart"
            )
        ties += difference is not None
        tokens += len(answer.tokens)
    return f"{tokens} tokens of {len(case.answers)} answers, {ties} numeric ties"


def _acceptance(case: _Case) -> str:
    counted, decoded = [], []
    for answer in case.answers:
        features = capture(case.target, case.ids(answer), case.taps)[0]
        counted += count(answer, guess_everywhere(case.target, case.draft, answer, features)).made
        decoded += speculative_decode(case.target, case.draft, answer.prompt_ids, len(answer.tokens)).acceptance_lengths
    if counted != decoded:
        raise DflashError(f"{sum(counted) / len(counted):.4f} counted, {sum(decoded) / len(decoded):.4f} decoded")
    return f"{sum(decoded) / len(decoded):.3f} tokens a verification, {len(decoded)} verifications alike"


def _served(case: _Case, url: str, prompts: list[list[int]], max_new_tokens: int, at_once: int) -> str:
    # The server may round differently and answer otherwise: what its own answers take is counted, not ours.
    asked = [prompts[i % len(prompts)] for i in range(max(at_once, len(prompts)))]
    answers = ask_server(url, asked, max_new_tokens, at_once)
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    served = sum(answer.verifications for answer in answers)
    counted = 0
    for answer in answers:
        ours = Answer(answer.prompt_ids, answer.tokens)
        features = capture(case.target, case.ids(ours), case.taps)[0]
        counted += len(count(ours, guess_everywhere(case.target, case.draft, ours, features)).made)
    lengths = f"{tokens / max(served, 1):.3f} served, {tokens / max(counted, 1):.3f} counted"
    if abs(served - counted) > SERVED_TOLERANCE * counted:
        raise DflashError(f"{lengths} tokens a verification, allowed is a difference of {SERVED_TOLERANCE:.0%}")
    return f"{lengths} tokens a verification, {served} and {counted} verifications of {len(answers)} answers"


def _largest_difference(pairs: list[tuple[Tensor, Tensor]]) -> str:
    worst = max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
    if not worst <= TOLERANCE:
        raise DflashError(f"differ by {worst:.2g} of the largest value, allowed is {TOLERANCE:g}")
    return f"within {worst:.1e} of the largest value"
