"""What is known of a target from its files alone is what the loaded target says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dflash.cli import app
from dflash.config import DraftConfig
from dflash.errors import DflashError
from dflash.export import write_draft
from dflash.initialize import initialize
from dflash.target import Target
from dflash.target_files import read_fit
from tests.unit.dflash.conftest import tiny_model


@pytest.fixture
def folder(target_folder: Path, tmp_path: Path) -> Path:
    """A target's folder to change."""
    return Path(shutil.copytree(target_folder, tmp_path / "target"))


def rename(folder: Path, prefix: str, instead: str) -> None:
    """Give each tensor of the folder that begins with `prefix` another beginning."""
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.replace(prefix, instead, 1): tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )


def assert_fits_as(target: Target, folder: Path) -> None:
    found = read_fit(folder)
    assert (found.path, found.layers) == (folder, len(target.layers))
    assert torch.equal(found.embedding, target.embedding.weight)


def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)


def test_an_export_reads_the_embedding_alone(
    target: Target, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = initialize(DraftConfig(num_layers=2, block_size=4, mask_token_id=96), target, seed=0)
    write_draft(draft, tmp_path / "draft", torch.float32)
    forbid_loading(monkeypatch)
    arguments = ["export", str(tmp_path / "draft"), str(tmp_path / "exported"), "--target", str(target_folder)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_the_embedding_is_found_in_one_of_several_files(
    target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    assert len(list(folder.glob("*.safetensors"))) > 1
    forbid_loading(monkeypatch)
    assert_fits_as(target, folder)


def test_the_embedding_is_found_inside_a_larger_model(
    target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename(folder, "model.", "model.language_model.")
    forbid_loading(monkeypatch)
    assert_fits_as(target, folder)


def test_a_folder_without_safetensors_is_loaded_whole(target: Target, folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    found = read_fit(folder)
    assert found.layers == len(target.layers)
    assert torch.equal(found.embedding, target.embedding.weight.bfloat16())


def test_a_broken_file_and_a_missing_folder_are_named(folder: Path) -> None:
    with pytest.raises(DflashError, match=r"config\.json is missing"):
        read_fit(folder / "nowhere")
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(DflashError, match=r"model\.safetensors: not readable as safetensors"):
        read_fit(folder)


def test_a_mixed_family_is_read_too(tmp_path: Path) -> None:
    model = tiny_model("qwen3_5", tied=False)
    model.save_pretrained(tmp_path)
    assert torch.equal(read_fit(tmp_path).embedding, model.get_input_embeddings().weight)
