"""The target's features, head and mask token are what the drafter and the server will see."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from dflash.errors import DflashError
from dflash.target import Target, capture, check_mask_token, load_target, resolve_mask_token, wrap_target
from tests.unit.dflash.conftest import tiny_model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_features_are_the_hidden_states_after_the_tapped_layers(family: str, tied: bool) -> None:
    target = wrap_target(tiny_model(family, tied), Path(family))
    ids = torch.randint(2, 90, (2, 11), generator=torch.Generator().manual_seed(1))
    expected = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    taps = (4, 0, 2)
    assert torch.equal(capture(target, ids, taps), torch.cat([expected[i + 1] for i in taps], dim=-1))


def test_layers_after_the_deepest_tap_and_the_head_do_not_run(target: Target) -> None:
    ran = []
    handles = [layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(target.layers)]
    output = target.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    handles.append(output.register_forward_pre_hook(lambda *_: ran.append("head")))
    capture(target, torch.tensor([[5, 6]]), (1, 2))
    for handle in handles:
        handle.remove()
    assert ran == [0, 1, 2]


def test_the_head_gives_the_targets_logits(target: Target) -> None:
    ids = torch.tensor([[5, 9, 11]])
    output = target.model(input_ids=ids, output_hidden_states=True)
    assert torch.allclose(output.hidden_states[-1] @ target.head.T, output.logits, atol=1e-5)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"nowhere: no target model here"):
        load_target(tmp_path / "nowhere", torch.float32)


def test_a_folder_without_some_weights_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "incomplete"
    shutil.copytree(llama_folder, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DflashError, match=r"1 weights are missing.*layers\.2\.mlp\.up_proj"):
        load_target(folder, torch.float32)


def test_an_untied_head_that_is_missing_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "headless"
    shutil.copytree(llama_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(DflashError, match=r"lm_head\.weight"):
        load_target(folder, torch.float32)


def test_a_mask_token_needs_an_embedding_row_with_a_signal(llama_folder: Path) -> None:
    target = load_target(llama_folder, torch.float32)
    check_mask_token(target.fit, 96)
    with pytest.raises(DflashError, match=r"mask token 97 has no embedding row"):
        check_mask_token(target.fit, 97)
    with torch.no_grad():
        target.embedding.weight[96] = 1e-6
    with pytest.raises(DflashError, match="almost zero"):
        check_mask_token(target.fit, 96)


def test_without_a_tokenizer_the_mask_token_must_be_given(llama_folder: Path) -> None:
    with pytest.raises(DflashError, match="no mask_token_id given"):
        resolve_mask_token(load_target(llama_folder, torch.float32), None)


@pytest.mark.parametrize(("device", "said"), [("gpux", "must be cpu, cuda or cuda:N"), ("cuda:99", "cards are here")])
def test_a_device_that_is_not_there_is_told_in_one_line(llama_folder: Path, device: str, said: str) -> None:
    with pytest.raises(DflashError, match=rf"device {device}: .*{said}"):
        load_target(llama_folder, torch.float32, device)


def test_weights_go_straight_to_one_card(target: Target, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, maps = AutoModelForCausalLM.from_pretrained, []

    def load_here(*arguments: Any, device_map: dict[str, torch.device], **options: Any) -> Any:
        maps.append(device_map)
        # There is no card here, but the CPU is a device like any other.
        return load(*arguments, device_map={"": torch.device("cpu")}, **options)

    monkeypatch.setattr("dflash.target.check_device", lambda _device: None)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_here)
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, device: model if device == "cuda:1" else None)
    loaded = load_target(target_folder, torch.float32, "cuda:1").model
    assert maps == [{"": torch.device("cuda:1")}]
    for name, tensor in {**dict(target.model.named_parameters()), **dict(target.model.named_buffers())}.items():
        assert torch.equal({**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}[name], tensor)
    tied = loaded.config.tie_word_embeddings
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) is tied
