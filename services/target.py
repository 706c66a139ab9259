"""What the files of the target model say of it; needs no tokenizer library."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.errors import UserError

# Enough of a weights file to tell models apart: its header names tensors, its end holds weights.
SEEN_OF_WEIGHTS = 2**20


def vocabulary_size(path: Path) -> int:
    """Rows of the target's embedding: every valid id is below it. SGLang crashes on one that is not.

    Raises:
        UserError: config.json is missing, or does not say.
    """
    config = _read(path / "config.json")
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise UserError(f"{path / 'config.json'}: no vocab_size; this is no causal language model")
    return size


def added_token_ids(path: Path, tokens: Iterable[str]) -> dict[str, int]:
    """Ids of those of the given tokens that the tokenizer was given beside its merges, `<think>` for example."""
    wanted = set(tokens)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        content = _read(path / name) if (path / name).is_file() else {}
        listed = content.get("added_tokens_decoder")
        added = (
            [(int(number), token["content"]) for number, token in listed.items()]
            if listed
            else [(token["id"], token["content"]) for token in content.get("added_tokens", [])]
        )
        if added:
            return {text: number for number, text in added if text in wanted}
    return {}


def tokenizer_fingerprint(path: Path) -> str:
    """SHA-256 of the folder's tokenizer.json: equal fingerprints give equal ids."""
    try:
        return hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"target model {path}: tokenizer.json cannot be read: {error.strerror}") from error


def model_fingerprint(path: Path) -> str:
    """SHA-256 of the folder's config.json and of each weights file's name, size, first and last MiB."""
    digest = hashlib.sha256()
    try:
        digest.update((path / "config.json").read_bytes())
        for weights in sorted(path.glob("*.safetensors")):
            size = weights.stat().st_size
            digest.update(f"{weights.name} {size}".encode())
            with weights.open("rb") as file:
                digest.update(file.read(SEEN_OF_WEIGHTS))
                file.seek(max(0, size - SEEN_OF_WEIGHTS))
                digest.update(file.read(SEEN_OF_WEIGHTS))
    except OSError as error:
        raise UserError(f"target model {path}: {error.filename} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"target model {path.parent}: {path.name} cannot be read: {' '.join(str(error).split())}; "
            "correct target.path"
        ) from error
    return content
