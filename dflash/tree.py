"""Draft trees: several guesses for each position, verified in one pass of the target (DDTree).

The drafter's one pass gives a distribution for each position of the block. The likeliest prefixes become the nodes of a
tree whose root is the anchor; in the verifying pass a node sees the text before the block and its own ancestors, at the
position of its depth, so its logits are those that follow its path. The target's own choices then lead from the root to
the deepest node that agrees. What is produced is greedy decoding, as with a chain of guesses.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dflash.decode import DraftCache, SpeculativeOutput, as_row, cut_at_end, guess_logits, new_cache
from dflash.model import DraftModel
from dflash.target import Target, forward_with_cache


class Tree(NamedTuple):
    """Nodes with their parents before them; node 0 is the anchor, of depth 0 and without a parent (-1)."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    def ancestry(self) -> Tensor:
        """Return bool [nodes, nodes]: whether the column's node is the row's own or one of its ancestors."""
        seen = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            seen[node] |= seen[parent]
        return seen


def build_tree(anchor: int, log_probabilities: Tensor, budget: int) -> Tree:
    """Return the anchor and the `budget` likeliest prefixes under the drafter, likeliest first.

    A prefix is as likely as the product of its guesses, each taken from its own position alone.

    Args:
        log_probabilities: [slots, vocabulary], of each position of the block after the anchor.
        budget: nodes beside the anchor; fewer when the block has fewer prefixes.
    """
    best = log_probabilities.topk(min(budget, log_probabilities.shape[-1]), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    tree = Tree([anchor], [-1], [0])
    # Candidates by (-log probability, order of entry, parent, depth, rank); a node is followed by the next best guess
    # of its position and by the best of the next one, and none of these is likelier than itself.
    candidates: list[tuple[float, int, int, int, int]] = [(-values[0][0], 0, 0, 1, 0)]
    entered = 1
    while candidates and len(tree.tokens) <= budget:
        cost, _, parent, depth, rank = heapq.heappop(candidates)
        node = len(tree.tokens)
        tree.tokens.append(ids[depth - 1][rank])
        tree.parents.append(parent)
        tree.depths.append(depth)
        slot = values[depth - 1]
        if rank + 1 < len(slot):
            heapq.heappush(candidates, (cost + slot[rank] - slot[rank + 1], entered, parent, depth, rank + 1))
        if depth < len(values):
            heapq.heappush(candidates, (cost - values[depth][0], entered + 1, node, depth + 1, 0))
        entered += 2
    return tree


def follow(tree: Tree, choices: list[int]) -> list[int]:
    """Return the nodes, root first, along which `choices` (one for each node: what follows it) leads."""
    children = {(parent, tree.tokens[node]): node for node, parent in enumerate(tree.parents)}
    path = [0]
    while (node := children.get((path[-1], choices[path[-1]]))) is not None:
        path.append(node)
    return path


@torch.no_grad()
def tree_decode(
    target: Target, draft: DraftModel, prompt_ids: list[int], max_new_tokens: int, budget: int
) -> SpeculativeOutput:
    """Decode greedily, verifying a tree of `budget` guesses a pass.

    Raises DflashError for an empty prompt, or a target from whose cache rejected tokens cannot be taken.
    """
    taps = draft.architecture.target_layer_ids
    cache, draft_cache = new_cache(target), DraftCache(draft)
    prefill = forward_with_cache(target, as_row(prompt_ids, target), cache, taps, logits_to_keep=1)
    draft_cache.append(prefill.features)
    tokens = [int(prefill.logits[0, -1].argmax())]
    acceptance_lengths: list[int] = []
    while len(tokens) < max_new_tokens and tokens[-1] not in target.end_token_ids:
        logits = guess_logits(target, draft, tokens[-1], draft_cache)
        tree = build_tree(tokens[-1], logits.float().log_softmax(-1), budget)
        start = draft_cache.length
        seen = tree.ancestry().to(target.device)
        verified = forward_with_cache(
            target,
            as_row(tree.tokens, target),
            cache,
            taps,
            attention_mask=torch.cat((seen.new_ones(len(seen), start), seen), dim=1)[None, None],
            position_ids=start + torch.tensor([tree.depths], device=target.device),
        )
        choices = verified.logits[0].argmax(-1).tolist()
        path = follow(tree, choices)
        _keep_path(cache, start, path)
        draft_cache.append(verified.features[:, path])
        # Every choice along the path is the target's own; the last of them is the bonus token.
        kept = cut_at_end([choices[node] for node in path], max_new_tokens - len(tokens), target)
        tokens += kept
        acceptance_lengths.append(len(kept))
    return SpeculativeOutput(tokens, acceptance_lengths)


def _keep_path(cache: Cache, start: int, path: list[int]) -> None:
    """Keep the cache's first `start` rows and, of the tree after them, the rows of `path`."""
    layers: Any = cache.layers  # DynamicLayers, as new_cache makes sure
    for layer in layers:
        rows = torch.tensor([*range(start), *(start + node for node in path)], device=layer.keys.device)
        layer.keys, layer.values = layer.keys.index_select(2, rows), layer.values.index_select(2, rows)
