"""A target on several cards is the whole one: every bit, every tap, and each tensor on the card it is planned for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from dflash.config import TopologyConfig
from dflash.decode import new_cache
from dflash.errors import DflashError
from dflash.founding import check_cards, own_devices
from dflash.placement import cards_of_layers, carry_along, place
from dflash.plan import cards_of_role, memory_parts, read_target_shape
from dflash.target import capture, capture_with_final, decoder_layers, forward_with_cache, load_target, wrap_target
from tests.unit.dflash.conftest import tiny_model, training_config

TAPS = (4, 0, 2)
FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])


def test_layers_stay_in_order_and_the_fullest_card_has_as_little_as_can_be() -> None:
    assert cards_of_layers([10] * 6, 0, 2) == [0, 0, 0, 1, 1, 1]
    # The first card has embedding and head beside its layers.
    assert cards_of_layers([10] * 6, 20, 2) == [0, 0, 1, 1, 1, 1]
    assert cards_of_layers([10] * 4, 60, 3) == [1, 1, 1, 1]
    assert cards_of_layers([30, 10, 10, 10], 5, 2) == [0, 1, 1, 1]
    assert cards_of_layers([10] * 6, 5, 1) == [0] * 6


@FAMILIES
def test_a_split_target_gives_the_bits_of_the_whole_one(family: str, tmp_path: Path) -> None:
    tiny_model(family, family == "llama").save_pretrained(tmp_path)
    whole, split = (load_target(tmp_path, torch.float32, *devices) for devices in ([], ["cpu", "cpu", "cpu"]))
    ids = torch.randint(2, 90, (1, 11), generator=torch.Generator().manual_seed(1))
    assert torch.equal(capture(split, ids, TAPS), capture(whole, ids, TAPS))
    for ours, expected in zip(capture_with_final(split, ids, TAPS), capture_with_final(whole, ids, TAPS), strict=True):
        assert torch.equal(ours, expected)


def test_a_cache_is_filled_by_layers_on_several_cards(target_folder: Path) -> None:
    whole, split = (load_target(target_folder, torch.float32, *devices) for devices in ([], ["cpu", "cpu"]))
    results = []
    for target in (whole, split):
        cache = new_cache(target)
        first = forward_with_cache(target, torch.tensor([[5, 9, 30]]), cache, TAPS)
        results.append([*first, *forward_with_cache(target, torch.tensor([[11, 7]]), cache, TAPS)])
    for expected, ours in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_tensors_are_where_the_plan_has_them(target_folder: Path) -> None:
    model: PreTrainedModel = load_target(target_folder, torch.float32).model
    layers = decoder_layers(model, target_folder)
    # A device that computes nothing stands for the second card.
    devices = [torch.device("cpu"), torch.device("meta")]
    place(model, layers, devices)
    topology = {"targets": 1, "cards_per_target": 2}
    config = training_config(target_folder, Path(), Path(), device="cuda", topology=topology)
    assert cards_of_role("target", config) == 2
    for card, device in enumerate(devices):
        here = sum(parameter.nbytes for parameter in model.parameters() if parameter.device == device)
        parts = memory_parts("target", config, read_target_shape(target_folder), 0, card)
        assert parts["target weights"] == here
        assert ("features of the pack" in parts) is (card == 0)
    beside = {*model.parameters(), *model.buffers()} - {*layers.parameters(), *layers.buffers()}
    assert {tensor.device for tensor in beside} == {devices[0]}
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    assert (output.weight is model.get_input_embeddings().weight) is model.config.tie_word_embeddings


@FAMILIES
def test_hidden_states_go_from_card_to_card_and_come_home(family: str) -> None:
    # Tensors without values that know their device: an operation on two devices is an error, as on real cards.
    home, away = torch.device("cpu"), torch.device("meta")
    with FakeTensorMode():
        model = tiny_model(family, tied=False).eval()
        layers = decoder_layers(model, Path())
        for layer in [*layers][2:]:
            recreate(layer, away)
        carry_along(layers, [home, home, away, away, away, away], home)
        target = wrap_target(model, Path())
        ids = torch.zeros(1, 7, dtype=torch.long)
        on_cards = []
        layers[4].register_forward_hook(lambda _layer, _inputs, output: on_cards.append(output.device))
        features, final = capture_with_final(target, ids, TAPS)
        assert features.shape == (1, 7, 3 * 32)
        assert features.device == final.device == capture(target, ids, TAPS).device == home
        assert target.model(input_ids=ids, use_cache=False).logits.device == home
        assert set(on_cards) == {away}


def recreate(module: nn.Module, device: torch.device) -> None:
    """Make the parameters and buffers of `module` anew on `device`, where those of a fake one cannot be moved to."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(parameter.detach().to(device), requires_grad=False))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


def test_drafters_have_the_first_cards_and_each_target_the_next_few(tmp_path: Path) -> None:
    topology = {"targets": 2, "drafters": 3, "cards_per_target": 2}
    config = training_config(tmp_path, tmp_path, tmp_path, device="cuda", topology=topology)
    assert [own_devices(config, rank) for rank in range(5)] == [
        ["cuda:0"],
        ["cuda:1"],
        ["cuda:2"],
        ["cuda:3", "cuda:4"],
        ["cuda:5", "cuda:6"],
    ]
    check_cards(config, 7)
    with pytest.raises(
        DflashError, match=r"needs 7 cards \(drafters: 3; targets: 2, cards of each: 2\), and 6 are here"
    ):
        check_cards(config, 6)


def test_a_colocated_drafter_has_one_card() -> None:
    with pytest.raises(ValueError, match="cards_per_target needs targets"):
        TopologyConfig(cards_per_target=2)
