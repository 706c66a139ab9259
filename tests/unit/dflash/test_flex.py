"""Flex attention sees what the mask's rule says, compiles once for each size, and is not used where it is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import InternalTorchDynamoError
from torch._dynamo.testing import CompileCounter

from dflash.attention import attention_by_prefix
from dflash.attention_choice import choose_attention, what_is_wrong
from dflash.errors import DflashError
from dflash.flex import (
    TILE,
    attention_by_tiles,
    compiled_flex_attention,
    padded_length,
    plain_flex_attention,
    tile_lists,
    tiled_mask,
    told_in_a_line,
)
from dflash.initialize import initialize
from dflash.mask import block_mask
from dflash.model import Attend, KeysValues, masked_attention
from dflash.pack import Pack
from dflash.step import accumulate_gradient
from dflash.target import load_target
from dflash.world import ALONE
from tests.flex_on_cpu import attention_by_plain_tiles
from tests.unit.dflash.test_step import Largest, config, gradients, make_pack, random_states

HEADS, KV_HEADS, WIDTH = 6, 2, 16


def random_pack(seed: int, longest: int = 400, blocks: int = 40) -> Pack:
    """Documents of all lengths; one whose only block sees nothing before it."""
    rng = np.random.default_rng(seed)
    lengths = [7, *rng.integers(blocks, longest, 3).tolist()]
    anchors = [np.sort(rng.choice(n, int(rng.integers(1, blocks)), replace=False)).tolist() for n in lengths[1:]]
    return make_pack(lengths, [[0], *anchors])


def operands(pack: Pack, block_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    rows, tokens = len(pack.anchors) * block_size, len(pack.input_ids)
    shapes = [(HEADS, rows), (KV_HEADS, tokens), (KV_HEADS, tokens), (KV_HEADS, rows), (KV_HEADS, rows)]
    return [torch.randn(1, *shape, WIDTH) for shape in shapes]


def attended(attend: Attend, tensors: list[Tensor], window: int | None = None) -> Tensor:
    return attend(tensors[0], KeysValues(*tensors[1:3]), KeysValues(*tensors[3:]), window)


def whole_mask(pack: Pack, block_size: int) -> Attend:
    return masked_attention(partial(block_mask, pack.documents, pack.anchors, block_size))


@pytest.mark.parametrize("window", [None, 2, 60, 250])
@pytest.mark.parametrize("block_size", [4, 10, 32, 200])
def test_lists_have_the_tiles_of_the_mask(block_size: int, window: int | None) -> None:
    pack = random_pack(block_size)
    tokens, blocks = len(pack.input_ids), len(pack.anchors)
    context_length, rows = padded_length(tokens), padded_length(blocks * block_size)
    padding = (0, -(-rows // block_size) - blocks)
    starts, anchors = (np.pad(stretch.numpy(), padding) for stretch in (pack.starts(), pack.anchors))
    lists = tile_lists(starts, anchors, blocks, block_size, context_length, rows, window)

    mask = block_mask(pack.documents, pack.anchors, block_size, window)
    padded = torch.zeros(rows, context_length + rows, dtype=torch.bool)
    padded[: len(mask), :tokens] = mask[:, :tokens]
    padded[: len(mask), context_length : context_length + len(mask)] = mask[:, tokens:]
    tiles = padded.view(rows // TILE, TILE, -1, TILE).transpose(1, 2).flatten(2)
    some, every = tiles.any(-1), tiles.all(-1)
    for row in range(rows // TILE):
        in_part = {*lists.partial[row, : lists.partial_counts[row]].tolist()}
        full = {*lists.full[row, : lists.full_counts[row]].tolist()}
        seen, seen_wholly = ({*tiles[row].nonzero()[:, 0].tolist()} for tiles in (some, every))
        assert not in_part & full
        assert in_part | full >= seen
        assert full <= seen_wholly
        # At a window's edge a tile may be listed in part where less would do.
        assert window is not None or (full == seen_wholly and in_part == seen - seen_wholly)


def test_a_window_leaves_out_the_tiles_before_it_and_keeps_whole_ones() -> None:
    pack = make_pack([2000], [list(range(1500, 1532))])
    starts, anchors = pack.starts().numpy(), pack.anchors.numpy()
    counts = []
    for window in (None, 800):
        lists = tile_lists(starts, anchors, 32, 4, padded_length(2000), 128, window)
        counts.append((int(lists.partial_counts.sum()), int(lists.full_counts.sum())))
    # Rows 0 to 1499 before the first anchor; with a window those from 701 on, and all see those from 734 on.
    assert counts == [(2, 11), (3, 5)]


@pytest.mark.parametrize(("block_size", "window"), [(4, None), (10, 7), (32, None), (32, 40)])
def test_output_and_gradient_are_those_of_the_whole_mask(block_size: int, window: int | None) -> None:
    pack = random_pack(block_size, longest=120, blocks=12)
    tensors = [tensor.requires_grad_() for tensor in operands(pack, block_size)]
    upstream = torch.randn_like(tensors[0])
    results = []
    for attend in (attention_by_plain_tiles(pack, block_size), whole_mask(pack, block_size)):
        out = attended(attend, tensors, window)
        results.append([out, *torch.autograd.grad(out, tensors, upstream)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_compiled_it_goes_by_the_tiles_and_gives_the_same() -> None:
    pack = random_pack(0)
    tensors = operands(pack, 32)
    expected = attended(whole_mask(pack, 32), tensors)
    torch.testing.assert_close(attended(attention_by_tiles(pack, 32), tensors), expected, atol=1e-5, rtol=1e-4)
    # Tiles in no list are not computed at all: without any list nothing is seen.
    mask = tiled_mask(pack, 32)
    for counts in (mask.kv_num_blocks, mask.full_kv_num_blocks):
        assert counts is not None
        counts.zero_()
    blind = attention_by_tiles(pack, 32, lambda q, k, v, _: compiled_flex_attention()(q, k, v, mask))
    assert not attended(blind, tensors).any()


def test_packs_of_one_size_are_compiled_once() -> None:
    counter = CompileCounter()
    compiled = torch.compile(plain_flex_attention, backend=counter, dynamic=False, fullgraph=True)
    for number in range(4):
        pack = make_pack([300 + number, 400], [list(range(number, 200, 10)), list(range(number, 60, 5))[number:]])
        attended(attention_by_tiles(pack, 32, compiled), operands(pack, 32))
    assert counter.frame_count == 1


def test_lengths_are_padded_to_few_sizes_and_by_little() -> None:
    sizes = {n: padded_length(n) for n in range(1, 100_000, 17)}
    assert all(size % TILE == 0 and n <= size <= max(1.25 * n + TILE, TILE) for n, size in sizes.items())
    assert len(set(sizes.values())) < 40
    assert [padded_length(n) for n in (8192, 32_768, 49_152)] == [8192, 32_768, 49_152]


def test_a_production_mask_is_made_of_tiles_alone() -> None:
    pack = make_pack([4096] * 12, [list(range(100, 4000, 46))] * 12)
    with Largest() as largest:
        mask = tiled_mask(pack, 32)
    rows, keys = mask.shape[-2:]
    assert rows >= 32_000
    assert largest.elements < rows * keys / 5000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_s_gradient_is_that_of_the_other_attention(llama_folder: Path, dtype: str) -> None:
    settings = config(dtype=dtype, max_draft_rows=48)
    target = load_target(llama_folder, torch.float32)
    model = initialize(settings.draft, target, seed=0)
    pack = random_pack(3, longest=90, blocks=10)
    states = random_states(pack, model)
    results = []
    for attention in (attention_by_plain_tiles, attention_by_prefix):
        results.append(
            gradients(
                model,
                lambda way=attention: accumulate_gradient(model, target, pack, states, settings, attention=way)[0],  # type: ignore[misc]
            )
        )
    (loss, found), (other_loss, expected) = results
    share = 1e-4 if dtype == "float32" else 3e-2
    assert float(loss.loss) == pytest.approx(float(other_loss.loss), rel=share)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= share * float(gradient.norm()), name


def sees_its_anchor(pack: Pack, block_size: int) -> Attend:
    return attention_by_prefix(replace(pack, anchors=pack.anchors + 1, positions=pack.positions.roll(1)), block_size)


def does_not_compile(_pack: Pack, _block_size: int) -> Attend:
    raise RuntimeError("no kernel\nfor this card")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_attention_is_checked_before_it_is_used(llama_folder: Path, dtype: torch.dtype) -> None:
    shape = initialize(config().draft, load_target(llama_folder, torch.float32), seed=0).architecture
    shape = replace(shape, layer_types=("sliding_attention", "full_attention"), sliding_window=50)
    cpu = torch.device("cpu")
    assert what_is_wrong(attention_by_prefix, shape, dtype, cpu) is None
    assert what_is_wrong(attention_by_plain_tiles, shape, dtype, cpu) is None
    assert "the output differs from the reference's by" in (what_is_wrong(sees_its_anchor, shape, dtype, cpu) or "")
    assert what_is_wrong(does_not_compile, shape, dtype, cpu) == "RuntimeError: no kernel for this card"


def test_where_flex_attention_does_not_work_sdpa_takes_its_place(llama_folder: Path) -> None:
    shape = initialize(config().draft, load_target(llama_folder, torch.float32), seed=0).architecture
    cpu = torch.device("cpu")
    assert choose_attention(config(), shape, cpu, ALONE) == (attention_by_prefix, None)
    assert choose_attention(config(device="cuda", attention="sdpa"), shape, cpu, ALONE) == (attention_by_prefix, None)
    # Compiled for a CPU it has no gradient.
    chosen, note = choose_attention(config(device="cuda"), shape, cpu, ALONE)
    assert chosen is attention_by_prefix
    assert note is not None
    assert note.startswith("attention by sdpa, as flex attention does not work here (")
    assert "\n" not in note
    with pytest.raises(DflashError, match=r"attention: flex does not work here \(.*\): use auto or sdpa"):
        choose_attention(config(device="cuda", attention="flex"), shape, cpu, ALONE)


def test_flex_attention_is_refused_where_it_cannot_train() -> None:
    with pytest.raises(ValueError, match="attention: flex trains on CUDA devices only, not on cpu: use auto or sdpa"):
        config(attention="flex")


def test_a_size_that_does_not_compile_ends_the_run_with_what_to_do() -> None:
    def compiled(*_tensors: object) -> Tensor:
        raise InternalTorchDynamoError("no kernel\nfor this size")

    pack = random_pack(0)
    attend = attention_by_tiles(pack, 4, told_in_a_line(compiled))
    with pytest.raises(DflashError, match=r"\d+ rows and \d+ keys \(no kernel for this size\): set attention: sdpa"):
        attended(attend, operands(pack, 4))
