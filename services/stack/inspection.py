"""Look into a dataset: a sample with its mask, token by token, or all of it in numbers."""

import codecs
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.text import Text

from services.dataset_folder import describe, open_dataset, provenance_path, read_row
from services.errors import UserError
from services.files import read_json
from services.sample_rows import RowFaultError, Totals, check_columns, examine, read_totals
from services.stack.merge_table import lengths_table, merge_tables

# Two shades each, so that one token can be told from the next.
SUPERVISED = ("black on green", "black on bright_green")
CONTEXT = ("default", "bright_black")


def show_dataset(path: Path, console: Console) -> None:
    """Read every row and print what is in the dataset; for a merged one, what came from where.

    Raises:
        UserError: it is no dataset of samples, a row is none, or it is not what its merge.json says.
    """
    folder = open_dataset(path)
    check_columns(folder.schema, f"dataset {path}")
    merged = _merge_record(path)
    totals = read_totals(folder.shards, merged.get("vocabulary_size"))
    size = sum(shard.stat().st_size for shard in folder.shards)
    console.print(f"{path}: {len(folder.shards)} shards, {size / 1e6:,.0f} MB, fingerprint {folder.fingerprint}")
    console.print(describe(folder.schema))
    share = 100 * totals.supervised_tokens / max(totals.tokens, 1)
    console.print(
        f"{totals.samples:,} samples, {totals.tokens:,} tokens, {totals.supervised_tokens:,} of them supervised "
        f"({share:.1f} %)"
    )
    if not merged:
        console.print(lengths_table({"after": totals.as_json()}))
        return
    if totals != Totals.from_json(merged["after"]):
        told = merged["after"]
        raise UserError(
            f"{path}: merge.json says {told['samples']} samples and {told['tokens']} tokens, and {totals.samples} and "
            f"{totals.tokens} are there; a shard was changed since"
        )
    for table in merge_tables(merged):
        console.print(table)


def show_sample(path: Path, row: int, target: Path | None, console: Console) -> None:
    """Print one sample: where it came from, and its text with the supervised tokens marked.

    Raises:
        UserError: there is no such row, or the tokenizer is not known or not the dataset's.
    """
    folder = open_dataset(path)
    check_columns(folder.schema, f"dataset {path}")
    merged = _merge_record(path)
    tokens = _token_bytes(_tokenizer(path, merged, target))
    shard, in_shard, batch = read_row(folder, row)
    try:
        sample = examine(batch, merged.get("vocabulary_size"))
    except RowFaultError as fault:
        raise UserError(f"{shard} row {in_shard}: {fault}") from fault
    console.print(
        f"row {row}: {shard.name} row {in_shard}; {sample.tokens[0]:,} tokens, {sample.supervised[0]:,} supervised"
    )
    for name, value in _provenance(path, shard, in_shard).items():
        console.print(f"  {name}: {value}", markup=False)
    texts = list(token_texts([tokens.get(int(token), f"<{token}>".encode()) for token in sample.ids]))
    console.print(marked(texts, sample.mask.tolist(), colour=console.color_system is not None))


def marked(texts: Sequence[str], mask: Sequence[int], colour: bool) -> Text:
    """The sample's text: supervised tokens on green, or between [[ and ]] where there is no colour."""
    text = Text()
    for number, (token, supervised) in enumerate(zip(texts, mask, strict=True)):
        before = mask[number - 1] if number else 0
        if not colour and supervised != before:
            text.append("[[" if supervised else "]]")
        shown = token.replace("\n", "⏎\n")
        text.append(shown, style=(SUPERVISED if supervised else CONTEXT)[number % 2] if colour else "")
    if not colour and mask and mask[-1]:
        text.append("]]")
    return text


def token_texts(tokens: Sequence[bytes]) -> Iterator[str]:
    """The text of each token; a character of several tokens is shown at its last one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for number, token in enumerate(tokens):
        yield decoder.decode(token, final=number + 1 == len(tokens))


def _merge_record(path: Path) -> dict[str, Any]:
    return read_json(path / "merge.json") if (path / "merge.json").is_file() else {}


def _tokenizer(path: Path, merged: dict[str, Any], target: Path | None) -> dict[str, Any]:
    folder = target or (Path(merged["target"]) if merged else None)
    if folder is None:
        raise UserError(f"dataset {path}: no merge noted its model; name the model's folder with --target")
    try:
        content = (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        raise UserError(f"{folder}/tokenizer.json: {error.strerror}; name the model's folder with --target") from error
    if merged and hashlib.sha256(content).hexdigest() != merged["tokenizer"]:
        raise UserError(f"{folder}: its tokenizer is not the one of dataset {path}; name the right --target")
    tokenizer: dict[str, Any] = json.loads(content)
    return tokenizer


def _token_bytes(tokenizer: dict[str, Any]) -> dict[int, bytes]:
    """The bytes of every token. Byte-level vocabularies write each byte as a printable character."""
    byte_of = _byte_of_character()
    vocabulary = {
        number: bytes(byte_of[character] for character in token)
        if all(character in byte_of for character in token)
        else token.replace("▁", " ").encode()
        for token, number in tokenizer["model"]["vocab"].items()
    }
    return vocabulary | {token["id"]: token["content"].encode() for token in tokenizer["added_tokens"]}


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _provenance(path: Path, shard: Path, row: int) -> dict[str, Any]:
    file = provenance_path(path, shard.name)
    if not file.is_file():
        return {}
    try:
        found: dict[str, Any] = pq.read_table(file).slice(row, 1).to_pylist()[0]
    except (OSError, pa.ArrowInvalid, IndexError) as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    return found
