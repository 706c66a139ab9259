"""Sampled tokens are distributed as the target's own, whatever the drafter guesses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dflash.config import DraftConfig, Guessing, Sampling
from dflash.decode import keep_one_by_one, sampled_decode, speculative_decode
from dflash.decode_batch import sampled_decode_batch, speculative_decode_batch
from dflash.initialize import initialize
from dflash.sampling import Draws, distribution, draw, keep_drawn
from dflash.target import Target, load_target

VOCABULARY = 8
PROMPT = [2, 5, 3]
TOKENS = 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Of so few tokens that the probability of every answer can be written down."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    torch.manual_seed(5)
    config = LlamaConfig(vocab_size=VOCABULARY, eos_token_id=VOCABULARY - 1, initializer_range=0.4, **shape)
    folder = Path(tmp_path_factory.mktemp("small"))
    LlamaForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return load_target(folder, torch.float32)


def answers_and_probabilities(target: Target, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Every answer of at most TOKENS tokens and its probability, from the target's passes without a cache."""
    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        going = [answer for answer in answers if not answer or answer[-1] not in target.end_token_ids]
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([PROMPT + list(answer) for answer in going])).logits[:, -1]
        for answer, row in zip(going, distribution(logits, sampling).tolist(), strict=True):
            before = answers.pop(answer)
            answers |= {(*answer, token): before * p for token, p in enumerate(row) if p > 0}
    return answers


def chi_square(counts: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The statistic of each row of `counts` [rows, answers]; answers rarer than five are counted together."""
    rare = expected < 5
    grouped = np.concatenate((counts[:, ~rare], counts[:, rare].sum(1, keepdims=True)), axis=1)
    means = np.append(expected[~rare], expected[rare].sum())
    return np.asarray(((grouped - means) ** 2 / np.maximum(means, 1e-9)).sum(1))


@pytest.mark.parametrize("guessing", ["greedy", "sampled"])
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (1.5, 0.95, 7)])
def test_the_answers_are_distributed_as_the_targets_own(
    small_target: Target, guessing: Guessing, temperature: float, top_p: float, top_k: int
) -> None:
    sampling = Sampling(temperature, top_p, top_k, guessing)
    # Copies of the target's layers: guesses that are sometimes kept.
    config = DraftConfig(num_layers=1, block_size=3, target_layer_ids=(1,), mask_token_id=0, init="target")
    draft = initialize(config, small_target, seed=1)
    count = 6000
    draws = Draws([[7, i] for i in range(count)], CPU)
    outputs = speculative_decode_batch(small_target, draft, [PROMPT] * count, TOKENS, sampling, draws)
    lengths = [length for output in outputs for length in output.acceptance_lengths]
    assert {1, 2} <= set(lengths), "all guesses were kept, or none: the rule was hardly tried"

    exact = answers_and_probabilities(small_target, sampling)
    assert sum(exact.values()) == pytest.approx(1)
    index = {answer: i for i, answer in enumerate(exact)}
    counts = np.zeros((1, len(exact)))
    for output in outputs:
        counts[0, index[tuple(output.tokens)]] += 1  # KeyError: an answer that the target never gives
    probabilities = np.array(list(exact.values()))
    # What the statistic is when the answers do come from these probabilities: exceeded once in a thousand runs.
    simulated = np.random.default_rng(0).multinomial(count, probabilities / probabilities.sum(), size=1000)
    assert chi_square(counts, count * probabilities)[0] < chi_square(simulated, count * probabilities).max()


@pytest.mark.parametrize("guessing", ["greedy", "sampled"])
def test_a_batch_draws_what_each_prompt_draws_alone(target: Target, guessing: Guessing) -> None:
    sampling = Sampling(1.2, 0.95, 20, guessing)
    draft = initialize(DraftConfig(num_layers=2, block_size=4, mask_token_id=96, init="target"), target, seed=0)
    prompts = [[5, 9, 30], [7, 8], [20, 21, 22, 23, 24]]
    seeds = [[3, i] for i in range(len(prompts))]
    alone = [
        speculative_decode(target, draft, prompt, 30, sampling, Draws([seed], CPU))
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert speculative_decode_batch(target, draft, prompts, 30, sampling, Draws(seeds, CPU)) == alone
    assert len({length for output in alone for length in output.acceptance_lengths}) > 1


def test_the_target_alone_draws_the_same_in_a_batch(target: Target) -> None:
    sampling = Sampling(1.0, top_k=30)
    prompts, seeds = [[5, 9, 30], [7, 8]], [[1, 0], [1, 1]]
    alone = [
        sampled_decode(target, prompt, 20, sampling, Draws([seed], CPU))
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert sampled_decode_batch(target, prompts, 20, sampling, Draws(seeds, CPU)) == alone
    assert alone[0] != sampled_decode(target, prompts[0], 20, sampling, Draws([[2, 0]], CPU))


def random_distributions(*shape: int) -> Tensor:
    logits = torch.randn(*shape, 9, generator=torch.Generator().manual_seed(len(shape)))
    return distribution(logits, Sampling(1.0, top_k=6))


@pytest.mark.parametrize("from_a_draw", [True, False])
def test_keeping_a_batch_equals_keeping_one_by_one(from_a_draw: bool) -> None:
    p, q = random_distributions(1000, 4), random_distributions(1000, 3)
    guesses = draw(q, torch.rand(1000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    uniforms = Draws([[i] for i in range(1000)], CPU).uniform(list(range(1000)), 4)
    kept, following = keep_drawn(guesses, q if from_a_draw else None, p, uniforms)
    for i in range(1000):
        one = keep_one_by_one(guesses[i].tolist(), q[i] if from_a_draw else None, p[i], Draws([[i]], CPU))
        assert one == (int(kept[i]), int(following[i]))
    assert set(kept.tolist()) == {0, 1, 2, 3}


def test_a_distribution_keeps_the_likeliest_tokens_only() -> None:
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    assert distribution(logits, Sampling(1.0)).tolist() == pytest.approx([0.5, 0.2, 0.2, 0.1])
    assert distribution(logits, Sampling(1.0, top_k=1)).tolist() == [1, 0, 0, 0]
    assert distribution(logits, Sampling(1.0, top_p=0.6)).tolist() == pytest.approx([5 / 7, 2 / 7, 0, 0])
    assert distribution(logits, Sampling(1.0, top_p=0.01)).tolist() == [1, 0, 0, 0]
    assert distribution(logits, Sampling(0.5)).tolist() == pytest.approx([25 / 34, 4 / 34, 4 / 34, 1 / 34])
    # top-k first: of 5/7 and 2/7 the first alone reaches 0.7.
    assert distribution(logits, Sampling(1.0, top_p=0.7, top_k=2)).tolist() == [1, 0, 0, 0]


def test_a_draw_never_gives_what_has_no_weight() -> None:
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]).expand(3, 5)
    assert draw(weights, torch.tensor([0.0, 0.2999, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 1, 3]
