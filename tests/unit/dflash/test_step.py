"""A pack's gradient in bounded memory is the plain one: whatever the groups, the attention and the chunks of logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.attention import attention_by_prefix
from dflash.config import TrainingConfig
from dflash.data import Sample
from dflash.features import TargetStates
from dflash.initialize import initialize
from dflash.limits import Limits
from dflash.mask import block_mask
from dflash.model import DraftModel, KeysValues, masked_attention
from dflash.objective import BlockLoss, LabelTotals
from dflash.pack import Pack, build_pack
from dflash.step import accumulate_gradient, block_groups, labels_of, reference_loss
from dflash.target import Target, TargetEnds, load_target
from tests.unit.dflash.conftest import MASK, training_config

BLOCK_SIZE = 4
MIXED = {"ce": 0.3, "dpace": 0.5, "kl": 0.2, "lk_lambda": 0.4}
Gradients = dict[str, Tensor]


def config(**changes: Any) -> TrainingConfig:
    draft = {"num_layers": 2, "block_size": BLOCK_SIZE, "mask_token_id": MASK}
    return training_config(Path(), Path(), Path(), draft=draft, **changes)


def make_pack(lengths: list[int], anchors: list[list[int]], device: str = "cpu", seed: int = 0) -> Pack:
    """Documents whose first two tokens are unsupervised."""
    rng = np.random.default_rng(seed)
    samples = [Sample(rng.integers(2, 90, n), (np.arange(n) > 1).astype(np.int8)) for n in lengths]
    return build_pack(samples, [np.array(a, dtype=np.int64) for a in anchors], torch.device(device))


@pytest.fixture(scope="module")
def target(llama_folder: Path) -> Target:
    return load_target(llama_folder, torch.float32)


@pytest.fixture
def model(target: Target) -> DraftModel:
    return initialize(config().draft, target, seed=0)


@pytest.fixture
def pack() -> Pack:
    """Blocks that overlap, run past the end, begin at a document's first token, and a document without a block."""
    return make_pack([13, 9, 5, 17], [[2, 3, 4, 11], [0, 7], [], [2, 9, 14, 15]])


def random_states(pack: Pack, model: DraftModel) -> TargetStates:
    torch.manual_seed(1)
    tokens, width = len(pack.input_ids), model.fc.in_features
    return TargetStates(torch.randn(tokens, width), torch.randn(tokens, model.architecture.hidden_size))


def gradients(model: DraftModel, run: Callable[[], BlockLoss]) -> tuple[BlockLoss, Gradients]:
    model.zero_grad()
    result = run()
    return result, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("objective", [{"ce": 1.0}, {"ce": 0.0, "dpace": 1.0}, MIXED], ids=["ce", "dpace", "mixed"])
@pytest.mark.parametrize("max_draft_rows", [None, 4, 13, 24])
def test_groups_of_blocks_give_the_reference_s_loss_and_gradient(
    model: DraftModel, target: Target, pack: Pack, objective: dict[str, float], max_draft_rows: int | None
) -> None:
    settings = config(objective=objective, max_draft_rows=max_draft_rows, loss_chunk_blocks=2)
    states = random_states(pack, model)

    def plain() -> BlockLoss:
        result = reference_loss(model, target, pack, states, settings)
        result.loss.backward()  # type: ignore[no-untyped-call]
        return result

    expected, expected_gradients = gradients(model, plain)
    actual, actual_gradients = gradients(model, lambda: accumulate_gradient(model, target, pack, states, settings)[0])
    torch.testing.assert_close(actual.loss, expected.loss.detach())
    torch.testing.assert_close(actual.terms, expected.terms)
    assert torch.equal(actual.correct, expected.correct)
    # Context keys and values are shared by all groups: fc and hidden_norm are reached through nothing else.
    assert actual_gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(actual_gradients[name], gradient, atol=1e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("tokens_at_once", [1, 20, 30])
def test_documents_one_after_another_give_the_same_gradient(
    model: DraftModel, target: Target, pack: Pack, tokens_at_once: int
) -> None:
    settings, states = config(objective=MIXED), random_states(pack, model)
    expected, expected_gradients = gradients(
        model, lambda: accumulate_gradient(model, target, pack, states, settings)[0]
    )
    limits = Limits(max_draft_rows=8, loss_chunk_blocks=1, tokens_at_once=tokens_at_once)
    actual, actual_gradients = gradients(
        model, lambda: accumulate_gradient(model, target, pack, states, settings, limits=limits)[0]
    )
    torch.testing.assert_close(actual, expected)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(actual_gradients[name], gradient, atol=1e-6, rtol=1e-3, msg=name)


def test_gradients_of_several_packs_add_up_to_that_of_one_pack_with_all_their_documents(
    model: DraftModel, target: Target
) -> None:
    lengths, anchors = [13, 9, 17], [[2, 3, 11], [7], [2, 9]]
    settings = config(objective={"ce": 0.5, "dpace": 0.5})
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(2, 90, n), (np.arange(n) > 1).astype(np.int8)) for n in lengths]
    chosen = [np.array(a) for a in anchors]
    whole = build_pack(samples, chosen, torch.device("cpu"))
    states = random_states(whole, model)
    expected, expected_gradients = gradients(
        model, lambda: accumulate_gradient(model, target, whole, states, settings)[0]
    )
    totals = LabelTotals.of(labels_of(whole, settings))
    losses = []

    def apart() -> BlockLoss:
        first = 0
        for sample, positions in zip(samples, chosen, strict=True):
            end = first + len(sample.input_ids)
            part = TargetStates(states.features[first:end], None)
            pack = build_pack([sample], [positions], torch.device("cpu"))
            losses.append(accumulate_gradient(model, target, pack, part, settings, totals)[0])
            first = end
        return losses[0]

    _, found = gradients(model, apart)
    torch.testing.assert_close(sum(loss.loss for loss in losses), expected.loss)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("window", [None, 2, 17])
@pytest.mark.parametrize("seed", range(6))
def test_attention_by_prefix_is_attention_by_the_whole_mask(seed: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 70, 4).tolist()
    anchors = [np.sort(rng.choice(n, rng.integers(0, n + 1), replace=False)).tolist() for n in lengths]
    anchors[0] = [0]
    pack = make_pack(lengths, anchors)
    rows, keys, heads = len(pack.anchors) * BLOCK_SIZE, len(pack.input_ids), (6, 2)
    torch.manual_seed(seed)
    shapes = [(heads[0], rows), (heads[1], keys), (heads[1], keys), (heads[1], rows), (heads[1], rows)]
    tensors = [torch.randn(1, count, length, 8, requires_grad=True) for count, length in shapes]
    upstream = torch.randn(1, heads[0], rows, 8)
    results = []
    for attend in (
        attention_by_prefix(pack, BLOCK_SIZE),
        masked_attention(partial(block_mask, pack.documents, pack.anchors, BLOCK_SIZE)),
    ):
        out = attend(tensors[0], KeysValues(*tensors[1:3]), KeysValues(*tensors[3:]), window)
        results.append([out, *torch.autograd.grad(out, tensors, upstream)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_mask_over_the_whole_pack_is_made(model: DraftModel, target: Target) -> None:
    pack = make_pack([60] * 24, [list(range(2, 58, 2))] * 24)
    rows = len(pack.anchors) * BLOCK_SIZE
    with Largest() as largest:
        accumulate_gradient(model, target, pack, random_states(pack, model), config(loss_chunk_blocks=8))
    assert largest.elements < rows * (rows + len(pack.input_ids)) / 20


def test_a_step_asks_the_device_for_no_value(model: DraftModel, target: Target, pack: Pack) -> None:
    # A meta tensor has no value: whatever asks for one, and would hold up the host, raises.
    states = TargetStates(*(tensor.to("meta") for tensor in random_states(pack, model) if tensor is not None))
    on_meta = TargetEnds(copy.deepcopy(target.embedding).to("meta"), target.head.to("meta"), Path())
    settings = config(objective=MIXED, max_draft_rows=16, loss_chunk_blocks=2)
    result, labels = accumulate_gradient(model.to("meta"), on_meta, pack.to(torch.device("meta")), states, settings)
    assert result.loss.device.type == "meta"
    assert len(result.correct) == int((labels.weights > 0).sum())


def test_groups_are_as_few_and_as_equal_as_the_limit_allows() -> None:
    assert block_groups(10, 4, 40) == [slice(0, 10)]
    assert block_groups(10, 4, 16) == [slice(0, 3), slice(3, 6), slice(6, 10)]
    assert block_groups(10, 4, 7) == [slice(i, i + 1) for i in range(10)]


def test_a_limit_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="max_draft_rows 3 is less than one block of 4"):
        config(max_draft_rows=3)
