"""Make a corpus of samples from conversations that come as text: rows of JSONL or Parquet with `messages`.

python -m services.tokenizer.corpus CONVERSATIONS TARGET OUTPUT
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from services import chat
from services.dataset_folder import write_shards, write_state
from services.errors import UserError
from services.files import publish_folder, publish_json, read_json
from services.ledger import check_balance
from services.records import SAMPLE_SCHEMA
from services.target import tokenizer_fingerprint
from services.tokenizer.conversations import NoConversationError, read_conversation
from services.tokenizer.replies import RejectedError, ReplyFinder, TextRow, Thinking

ROWS_A_BATCH = 1000

OverLength = Literal["drop", "keep_tail"]


@dataclass
class CorpusCounts:
    """What became of every row: `read` = `conversations` + `dropped`.

    A conversation gives one sample or, when its history changes between renderings and the policy says so, several:
    `samples` = `conversations` + `split`. `skipped` are replies in them that are context only, by reason
    (`replies.ReplyFinder.rows`, and `cut` for one that lost its beginning, or is gone, with the beginning of its
    sample); `shortened` are samples that lost theirs.
    """

    read: int = 0
    conversations: int = 0
    samples: int = 0
    split: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    shortened: int = 0
    over_length_rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    supervised_turns: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Length:
    """How long a sample may be, and what becomes of a longer one."""

    limit: int | None = None
    over: OverLength = "drop"

    def fit(self, row: TextRow) -> TextRow | None:
        """The row, or its tail; None when it has to go.

        A reply that would lose its beginning, or the last token before it, is context then. The last one is kept whole,
        with a token before it.
        """
        if self.limit is None or len(row.input_ids) <= self.limit:
            return row
        cut = len(row.input_ids) - self.limit
        mask = row.loss_mask[cut:]
        if self.over == "drop":
            return None
        if mask[0]:
            lost = mask.index(0) if 0 in mask else len(mask)
            mask[:lost] = [0] * lost
        replies = sum(one > before for before, one in pairwise(mask))
        return TextRow(row.input_ids[cut:], mask, row.supervised[-replies:]) if replies else None


def build_corpus(
    conversations: Path, finder: ReplyFinder, output: Path, length: Length = Length(), **notes: str
) -> dict[str, Any]:
    """Publish a dataset folder, with corpus.json in it, and return that; a folder that is there is left as it is.

    Args:
        conversations: JSONL, or Parquet; see `conversations.read_conversation` for the rows.
        notes: what else corpus.json is to say of how the corpus is made.

    Raises:
        UserError: there is no such file, no row of it gives a sample, or `output` is something else or was made of
            something else.
    """
    if not conversations.is_file():
        raise UserError(f"conversations {conversations}: there is no such file")
    record = output / "corpus.json"
    if output.exists() and not record.is_file():
        raise UserError(f"{output} is there, but is no corpus made here (it has no {record.name}); name another folder")
    made_of = {"file": str(conversations.absolute()), "max_length": length.limit, "over_length": length.over, **notes}
    publish_folder(output, lambda folder: _fill(folder, conversations, finder, length, made_of))
    content = read_json(record)
    # An earlier version told less.
    differences = [
        f"{name} was {content[name]}, is {made_of[name]}"
        for name in made_of
        if name in content and content[name] != made_of[name]
    ]
    if differences:
        raise UserError(
            f"{output} is there, and was made otherwise ({'; '.join(differences)}); name another folder, or remove it"
        )
    return content


def _fill(
    folder: Path, conversations: Path, finder: ReplyFinder, length: Length, made_of: dict[str, str | int | None]
) -> None:
    counts = CorpusCounts()
    rows = _samples(conversations, finder, length, counts)
    digest = hashlib.sha256()

    def tables() -> Iterator[pa.Table]:
        while batch := list(islice(rows, ROWS_A_BATCH)):
            digest.update(json.dumps(batch).encode())
            yield pa.Table.from_pylist(batch, schema=SAMPLE_SCHEMA)

    shards = write_shards(folder, SAMPLE_SCHEMA, tables())
    counts.skipped += finder.skipped
    check_balance(f"{conversations}", counts.read, {"conversations": counts.conversations, **counts.dropped})
    check_balance(f"{conversations}", counts.samples, {"conversations": counts.conversations, "split": counts.split})
    if not counts.samples:
        raise UserError(
            f"conversations {conversations}: none of {counts.read} rows gives a sample ({dict(counts.dropped)}); "
            'each has to be {"messages": [{"role": ..., "content": ...}, ...]} with a reply of the assistant'
        )
    write_state(folder, shards, digest.hexdigest()[:16])
    publish_json(folder / "corpus.json", {**made_of, **vars(counts)})


def _samples(path: Path, finder: ReplyFinder, length: Length, counts: CorpusCounts) -> Iterator[dict[str, Any]]:
    for read in _read_rows(path):
        counts.read += 1
        try:
            if read is None:
                raise NoConversationError("no_conversation")
            rows = finder.rows(*read_conversation(read))
        except chat.RenderingError:
            counts.dropped["template_refused"] += 1
            continue
        except (NoConversationError, RejectedError) as error:
            counts.dropped[str(error)] += 1
            continue
        if not rows:
            counts.dropped["no_supervised_token"] += 1
            continue
        fitting = [(row, fitted) for row in rows if (fitted := length.fit(row)) is not None]
        if not fitting:
            counts.dropped["over_length"] += 1
            continue
        counts.conversations += 1
        counts.over_length_rows += len(rows) - len(fitting)
        counts.split += len(fitting) - 1
        for row, fitted in fitting:
            counts.shortened += len(fitted.input_ids) < len(row.input_ids)
            counts.samples += 1
            counts.tokens += len(fitted.input_ids)
            counts.supervised_tokens += sum(fitted.loss_mask)
            counts.supervised_turns += len(fitted.supervised)
            if lost := len(row.supervised) - len(fitted.supervised):
                counts.skipped["cut"] += lost
            yield {
                "input_ids": fitted.input_ids,
                "loss_mask": fitted.loss_mask,
                "seq_len": len(fitted.input_ids),
            }


def _read_rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """The rows of a file; None for one that is no JSON object, or whose text is not UTF-8."""
    if path.suffix == ".parquet":
        try:
            with pq.ParquetFile(path) as file:
                columns = [name for name in ("messages", "conversations", "tools") if name in file.schema_arrow.names]
                for batch in file.iter_batches(batch_size=ROWS_A_BATCH, columns=columns):
                    yield from _decoded(batch)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"conversations {path} cannot be read: {' '.join(str(error).split())}") from error
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                row = None
            yield row if isinstance(row, dict) else None


def _decoded(batch: pa.RecordBatch) -> list[dict[str, Any] | None]:
    """Parquet's writers do not all check that text is UTF-8; of a batch with such text the other rows are kept."""
    try:
        rows: list[dict[str, Any] | None] = batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [row for number in range(batch.num_rows) for row in _decoded(batch.slice(number, 1))]
    return rows


def main(
    conversations: Annotated[Path, typer.Argument(help='JSONL or Parquet, {"messages": [...]} a row')],
    target: Annotated[Path, typer.Argument(help="the target's Hugging Face folder")],
    output: Annotated[Path, typer.Argument(help="the dataset folder to make")],
    max_length: Annotated[int | None, typer.Option(min=2, help="tokens of a sample")] = None,
    over_length: Annotated[str, typer.Option(help="a longer sample: drop, or keep_tail")] = "drop",
    thinking: Annotated[
        str, typer.Option(help="of the history: last_turn, one_row_per_turn or preserve; see docs/data.md")
    ] = "last_turn",
    exact: Annotated[bool, typer.Option("--exact", help="measure every conversation, and not each layout")] = False,
) -> None:
    """Make a dataset of input_ids, loss_mask and seq_len from conversations."""
    try:
        for name, given, known in (
            ("--over-length", over_length, get_args(OverLength)),
            ("--thinking", thinking, get_args(Thinking)),
        ):
            if given not in known:
                raise UserError(f"{name} {given}: there are {', '.join(known)}")
        tokenizer = chat.load_tokenizer(target)
        finder = ReplyFinder(tokenizer, cast(Thinking, thinking), exact=exact)
        notes = {"tokenizer": tokenizer_fingerprint(target), "template": chat.template_fingerprint(tokenizer)}
        length = Length(max_length, cast(OverLength, over_length))
        counts = build_corpus(conversations, finder, output, length, thinking=thinking, **notes)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        told_by_system = " ".join(str(error).split())
        typer.echo(f"error: {output} is not made, and nothing is left of it: {told_by_system}", err=True)
        raise typer.Exit(1) from None
    told = {
        name: ", ".join(f"{count} {reason}" for reason, count in counts[name].items()) or "none"
        for name in ("dropped", "skipped")
    }
    typer.echo(
        f"{output}: {counts['samples']} samples of {counts['read']} conversations (dropped: {told['dropped']}), "
        f"{counts['tokens']} tokens, {counts['supervised_tokens']} of them supervised; replies that are context only: "
        f"{told['skipped']}"
    )


if __name__ == "__main__":
    typer.run(main)
