"""Draft trees hold the likeliest prefixes, and decoding with them gives the target's own tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from dflash.config import DraftConfig
from dflash.decode import greedy_decode, speculative_decode
from dflash.errors import DflashError
from dflash.initialize import initialize
from dflash.target import Target, load_target
from dflash.tree import Tree, build_tree, follow, tree_decode
from tests.unit.dflash.conftest import tiny_model


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """The guesses from the root to each node but the root."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree.tokens)):
        found.append((*found[tree.parents[node]], tree.tokens[node]))
    return found[1:]


@pytest.mark.parametrize("budget", [1, 2, 7, 40, 500])
def test_the_nodes_are_the_likeliest_prefixes(budget: int) -> None:
    slots, vocabulary = 3, 6
    logits = 2 * torch.randn(slots, vocabulary, generator=torch.Generator().manual_seed(budget))
    log_probabilities = logits.log_softmax(-1)
    tree = build_tree(99, log_probabilities, budget)
    every = [prefix for n in range(1, slots + 1) for prefix in itertools.product(range(vocabulary), repeat=n)]
    likely = sorted(every, key=lambda prefix: -sum(float(log_probabilities[i, t]) for i, t in enumerate(prefix)))
    assert paths(tree) == likely[:budget]
    assert tree.tokens[0] == 99
    assert tree.depths == [0, *(len(path) for path in paths(tree))]


def test_a_node_sees_itself_and_its_ancestors_only() -> None:
    tree = Tree([9, 1, 2, 3, 4], [-1, 0, 1, 0, 1], [0, 1, 2, 1, 2])
    assert tree.ancestry().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_the_targets_choices_lead_to_the_deepest_node_that_agrees() -> None:
    tree = Tree([9, 1, 2, 3, 4], [-1, 0, 1, 0, 1], [0, 1, 2, 1, 2])
    assert follow(tree, [1, 4, 0, 0, 7]) == [0, 1, 4]
    assert follow(tree, [3, 4, 0, 0, 7]) == [0, 3]
    assert follow(tree, [8, 4, 0, 0, 7]) == [0]


def test_decoding_with_trees_gives_the_targets_own_tokens_in_fewer_passes(target: Target) -> None:
    draft = initialize(DraftConfig(num_layers=2, block_size=4, mask_token_id=96, init="target"), target, seed=0)
    chain, trees, lengths = 0, 0, set()
    for prompt in ([5, 9, 30], [20, 21, 22, 23, 24], [7, 8]):
        own = greedy_decode(target, prompt, 24).tokens
        output = tree_decode(target, draft, prompt, 24, budget=90)
        assert output.tokens == own
        assert len(output.tokens) == 1 + sum(output.acceptance_lengths)
        lengths |= set(output.acceptance_lengths)
        trees += len(output.acceptance_lengths)
        chain += len(speculative_decode(target, draft, prompt, 24).acceptance_lengths)
    assert len(lengths) > 2, "all trees were accepted alike: the caches were hardly tried"
    assert trees < chain


def test_a_tree_of_one_branch_is_the_chain(target: Target) -> None:
    """With room for one node only the likeliest first guess is verified."""
    draft = initialize(DraftConfig(num_layers=2, block_size=2, mask_token_id=96, init="target"), target, seed=0)
    output = tree_decode(target, draft, [5, 9, 30], 16, budget=1)
    assert output == speculative_decode(target, draft, [5, 9, 30], 16)


def test_a_hybrid_target_is_refused_with_the_reason(tmp_path: Path) -> None:
    tiny_model("qwen3_5", True).save_pretrained(tmp_path)
    target = load_target(tmp_path, torch.float32)
    draft = initialize(DraftConfig(num_layers=1, block_size=4, mask_token_id=96), target, seed=0)
    with pytest.raises(DflashError, match="rejected tokens cannot be taken out of its cache"):
        tree_decode(target, draft, [5, 9], 8, budget=4)
