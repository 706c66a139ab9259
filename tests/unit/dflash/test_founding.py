"""What the first target hands out is what the drafters begin with, and goes tensor by tensor."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from dflash.founding import Foundation, hand_out, receive
from dflash.model import DraftModel
from dflash.target import Target, load_target, wrap_target
from dflash.world import World
from tests.unit.dflash.conftest import tiny_model, training_config


class Wire(World):
    """A world of one target and one drafter in one process: the target speaks first, then the drafter listens."""

    said: list[Any]
    target_speaks: bool

    def share_among_founders(self, value: Any) -> Any:
        if self.target_speaks:
            self.said.append(pickle.dumps(value))
        return value if self.target_speaks else pickle.loads(self.said.pop(0))

    def hand_on(self, tensor: Tensor) -> None:
        if self.target_speaks:
            self.said.append(tensor.clone())
        else:
            tensor.copy_(self.said.pop(0))


def wire(rank: int, said: list[Any]) -> Wire:
    world = Wire(rank=rank, targets=1, drafters=1)
    object.__setattr__(world, "said", said)
    object.__setattr__(world, "target_speaks", rank == 1)
    return world


def handed(target: Target, folder: Path) -> tuple[DraftModel, Foundation, list[Any]]:
    """Return what the target keeps, what the drafter gets, and all that was said."""
    config = training_config(folder, folder, folder, topology={"targets": 1, "drafters": 1})
    said: list[Any] = []
    model = hand_out(config, wire(1, said), target)
    assert model is not None
    words = list(said)
    foundation = receive(config, wire(0, said), "cpu")
    assert not said
    return model, foundation, words


def test_a_drafter_begins_with_what_the_target_has_made(target: Target, tmp_path: Path) -> None:
    model, (received, ends), (facts, *tensors) = handed(target, tmp_path)
    assert received.architecture == model.architecture
    assert all(parameter.requires_grad for parameter in received.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(received.state_dict()[name], tensor)
    assert torch.equal(ends.embedding.weight, target.embedding.weight)
    assert torch.equal(ends.head, target.head)
    tied = target.head is target.embedding.weight
    assert (ends.head is ends.embedding.weight) == tied
    assert not ends.embedding.weight.requires_grad
    # No tensor is pickled, and none goes twice.
    assert len(facts) < 8192
    assert len(tensors) == len(model.state_dict()) + (1 if tied else 2)


def test_states_of_bfloat16_and_an_embedding_that_scales_arrive_as_they_are(tmp_path: Path) -> None:
    model = tiny_model("llama", tied=False).bfloat16()
    scaled = Gemma3TextScaledWordEmbedding(97, 32, 0, embed_scale=32**0.5)
    scaled.weight = nn.Parameter(model.get_input_embeddings().weight.detach())
    model.set_input_embeddings(scaled)  # type: ignore[no-untyped-call]
    target = wrap_target(model, tmp_path)
    _, (_, ends), _ = handed(target, tmp_path)
    ids = torch.arange(97)
    assert torch.equal(ends.embedding(ids), target.embedding(ids))
    assert ends.head.dtype == torch.bfloat16
    assert torch.equal(ends.head, target.head)


def test_the_target_keeps_its_own_embedding(target_folder: Path, tmp_path: Path) -> None:
    target = load_target(target_folder, torch.float32)
    before = target.embedding.weight.clone()
    handed(target, tmp_path)
    assert torch.equal(target.embedding.weight, before)
