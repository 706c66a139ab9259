"""The proof of the main road: samples from ids against samples from the same answers as text.

python -m services.tokenizer.agreement RUN

Every completed answer is decoded, put behind its conversation, rendered and encoded again, and compared token by
token with the prompt's ids and the generated ones. What differs is counted by kind; the samples are from ids anyway.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from transformers import PreTrainedTokenizerBase

from services import chat
from services.chunks import read_chunks
from services.errors import UserError
from services.files import read_json, replace_json
from services.ledger import check_balance
from services.records import Completion, Prompt, read_completions, read_prompts
from services.runs import Run, check_same_tokenizer, open_run, read_settings
from services.settings import Addresses
from services.tokenizer.replies import RejectedError, ReplyFinder

KINDS = {
    "equal": "the same ids and the same mask",
    "truncated": "the same but for the end token, which a truncated answer has not",
    "retokenized": "the same text in other tokens than the model chose",
    "cut_character": "a truncated answer that ends within a character",
    "not_shown": "the template does not show the answer as it was generated",
    "prompt": "the prompt itself is rendered otherwise",
    "text": "another text",
}


class Sample(NamedTuple):
    """Ids from a prompt and its answer, of which the last `generated` are supervised."""

    input_ids: list[int]
    generated: int
    truncated: bool


def compare_run(run: Run, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Answers by kind of agreement, in all and by source; `agree` are the first two kinds, in percent.

    Raises:
        UserError: the run has no chunks, or its tokenizer is another.
    """
    settings = read_settings(run)
    check_same_tokenizer(run, settings.target.path, read_json(run.prepared)["tokenizer"])
    finder = ReplyFinder(tokenizer, thinking=settings.render.thinking)
    by_source: dict[str, Counter[str]] = {}
    for source, prompt, completion in _answers(run):
        by_source.setdefault(source, Counter())[compare(finder, prompt, completion)] += 1
    if not by_source:
        raise UserError(f"run {run.name} has no answers yet; see `dflash-stack status {run.name}`")
    total = sum(by_source.values(), Counter[str]())
    check_balance("answers by kind", total.total(), {kind: total[kind] for kind in KINDS})
    agree = 100 * (total["equal"] + total["truncated"]) / total.total()
    return {"answers": total.total(), "agree": round(agree, 2), "kinds": total, "sources": by_source}


def compare(finder: ReplyFinder, prompt: Prompt, completion: Completion) -> str:
    """The kind of agreement of one answer; a key of `KINDS`."""
    truncated = completion.finish_reason == "length"
    sample = Sample(prompt.input_ids + completion.output_ids, len(completion.output_ids), truncated)
    tools = json.loads(prompt.tools) if prompt.tools else []
    text = _text(finder, completion.output_ids, truncated)
    if truncated and text.endswith("\ufffd"):
        return "cut_character"
    messages = [*json.loads(prompt.messages), {"role": "assistant", "content": _with_opening(finder, prompt, text)}]
    try:
        rows = finder.rows(messages, tools)
    except (chat.RenderingError, RejectedError):
        return "not_shown"
    row = next((row for row in rows if len(messages) - 1 in row.supervised), None)
    if row is None:
        return "not_shown"
    ids, mask = row.input_ids, row.loss_mask
    if truncated:  # the rendering closes the turn
        ids, mask = ids[:-1], mask[:-1]
    asked = len(prompt.input_ids)
    if ids[:asked] != prompt.input_ids:
        return "prompt"
    if ids == sample.input_ids and mask[asked:] == [1] * sample.generated:
        return "truncated" if truncated else "equal"
    same_text = finder.tokenizer.decode(ids[asked:]) == finder.tokenizer.decode(completion.output_ids)
    return "retokenized" if same_text else "text"


def _text(finder: ReplyFinder, output_ids: list[int], truncated: bool) -> str:
    """The answer without its end token."""
    ids = output_ids if truncated else output_ids[:-1]
    return str(finder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _with_opening(finder: ReplyFinder, prompt: Prompt, text: str) -> str:
    """The answer with the opening mark that its prompt ended with."""
    end = str(finder.tokenizer.decode(prompt.input_ids[-8:])).rstrip("\n")
    return f"<think>\n{text}" if end.endswith("<think>") else text


def _answers(run: Run) -> Iterator[tuple[str, Prompt, Completion]]:
    for chunk in read_chunks(run):
        path = run.completions(chunk.chunk)
        if not path.is_file():
            continue
        prompts = {
            prompt.prompt_id: prompt for prompt in read_prompts(run.prompts(chunk.source), chunk.first, chunk.count)
        }
        for completion in read_completions(path):
            if completion.status == "completed" and completion.output_ids:
                yield chunk.source, prompts[completion.prompt_id], completion


def main(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="name of the run")],
    runs: Annotated[Path | None, typer.Option(help="folder of all runs; default: $DFLASH_RUNS")] = None,
) -> None:
    """Compare a run's samples from ids with the same answers rendered from text."""
    try:
        run = open_run(runs or Addresses().runs, run_name)
        found = compare_run(run, chat.load_tokenizer(read_settings(run).target.path))
        replace_json(run.agreement, found)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"run {run.name}: {found['answers']} answers, {found['agree']} % agree token by token")
    for kind, count in sorted(found["kinds"].items(), key=lambda item: -item[1]):
        listed = ", ".join(f"{source} {kinds[kind]}" for source, kinds in found["sources"].items() if kinds[kind])
        typer.echo(f"{count:8,} {kind}: {KINDS[kind]} ({listed})")


if __name__ == "__main__":
    typer.run(main)
