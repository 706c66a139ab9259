"""Make a corpus of samples from conversations that come as text: one JSON object {"messages": [...]} a line.

python -m services.tokenizer.corpus CONVERSATIONS.jsonl TARGET OUTPUT
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from transformers import PreTrainedTokenizerBase

from services import chat
from services.dataset_folder import write_shards, write_state
from services.errors import UserError
from services.ledger import check_balance
from services.records import SAMPLE_SCHEMA
from services.runs import publish_folder, publish_json, read_json

ROWS_A_BATCH = 1000


@dataclass
class CorpusCounts:
    """What became of every line: `read` = `samples` + `dropped`.

    `skipped_turns` are replies in samples that are context only (`chat.TextSample`).
    """

    read: int = 0
    samples: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    supervised_tokens: int = 0
    skipped_turns: int = 0


def build_corpus(
    conversations: Path, tokenizer: PreTrainedTokenizerBase, output: Path, max_length: int | None = None
) -> dict[str, Any]:
    """Publish a dataset folder, with corpus.json in it, and return that; a folder that is there is left as it is.

    Raises:
        UserError: there is no such file, no line of it gives a sample, or `output` is something else.
    """
    if not conversations.is_file():
        raise UserError(f"conversations {conversations}: there is no such file")
    record = output / "corpus.json"
    if output.exists() and not record.is_file():
        raise UserError(f"{output} is there, but is no corpus made here (it has no {record.name}); name another folder")
    publish_folder(output, lambda folder: _fill(folder, conversations, tokenizer, max_length))
    return read_json(record)


def _fill(folder: Path, conversations: Path, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> None:
    counts = CorpusCounts()
    rows = _samples(conversations, tokenizer, max_length, counts)
    digest = hashlib.sha256()

    def tables() -> Iterator[pa.Table]:
        while batch := list(islice(rows, ROWS_A_BATCH)):
            digest.update(json.dumps(batch).encode())
            yield pa.Table.from_pylist(batch, schema=SAMPLE_SCHEMA)

    shards = write_shards(folder, SAMPLE_SCHEMA, tables())
    check_balance(f"{conversations}", counts.read, {"samples": counts.samples, **counts.dropped})
    if not counts.samples:
        raise UserError(
            f"conversations {conversations}: none of {counts.read} lines gives a sample ({dict(counts.dropped)}); "
            'each has to be {"messages": [{"role": ..., "content": ...}, ...]} with a reply of the assistant'
        )
    write_state(folder, shards, digest.hexdigest()[:16])
    publish_json(folder / "corpus.json", vars(counts))


def _samples(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int | None, counts: CorpusCounts
) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for line in lines:
            counts.read += 1
            try:
                sample = chat.sample_from_conversation(tokenizer, _messages(line))
            except chat.RenderingError:
                counts.dropped["template_refused"] += 1
            except (ValueError, LookupError, TypeError):
                counts.dropped["no_conversation"] += 1
            else:
                if not sample.supervised_turns:
                    counts.dropped["no_supervised_token"] += 1
                elif max_length is not None and len(sample.input_ids) > max_length:
                    counts.dropped["over_length"] += 1
                else:
                    counts.samples += 1
                    counts.tokens += len(sample.input_ids)
                    counts.supervised_tokens += sum(sample.loss_mask)
                    counts.skipped_turns += sample.skipped_turns
                    yield {
                        "input_ids": sample.input_ids,
                        "loss_mask": sample.loss_mask,
                        "seq_len": len(sample.input_ids),
                    }


def _messages(line: bytes) -> list[chat.Message]:
    """The messages of a line; raises ValueError, LookupError or TypeError when they are none."""
    messages = json.loads(line.decode("utf-8"))["messages"]
    if not messages or not all(isinstance(message[key], str) for message in messages for key in ("role", "content")):
        raise ValueError("a message is no role and content")
    return list(messages)


def main(
    conversations: Annotated[Path, typer.Argument(help='JSONL, {"messages": [...]} a line')],
    target: Annotated[Path, typer.Argument(help="the target's Hugging Face folder")],
    output: Annotated[Path, typer.Argument(help="the dataset folder to make")],
    max_length: Annotated[int | None, typer.Option(min=1, help="drop longer samples, in tokens")] = None,
) -> None:
    """Make a dataset of input_ids, loss_mask and seq_len from conversations."""
    try:
        counts = build_corpus(conversations, chat.load_tokenizer(target), output, max_length)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    dropped = ", ".join(f"{count} {reason}" for reason, count in counts["dropped"].items()) or "none"
    typer.echo(
        f"{output}: {counts['samples']} samples of {counts['read']} conversations (dropped: {dropped}), "
        f"{counts['tokens']} tokens, {counts['supervised_tokens']} of them supervised"
    )


if __name__ == "__main__":
    typer.run(main)
