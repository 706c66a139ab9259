"""What a run would cost before it is paid: prompts, tokens and hours."""

from dataclasses import dataclass

import pyarrow.compute as pc
import pyarrow.parquet as pq

from services.chunks import Chunk
from services.ledger import count_generated, total
from services.runs import Run
from services.settings import Settings


@dataclass(frozen=True)
class Estimate:
    """`answer_tokens` for what is not answered yet; `basis` says where the mean comes from."""

    prompts: int
    chunks: int
    done_chunks: int
    prompt_tokens: int
    answer_tokens: int
    basis: str
    hours: float | None


def estimate(
    run: Run,
    settings: Settings,
    chunks: list[Chunk],
    mean_answer: float | None = None,
    tokens_per_second: float | None = None,
) -> Estimate:
    """Tokens to generate for the chunks that are not published, and hours at a rate that is given."""
    left = [chunk for chunk in chunks if not run.summary(chunk.chunk).is_file()]
    counts = total(count_generated(run).values())
    answered = counts.finished + counts.in_journal
    if mean_answer is not None:
        mean, basis = mean_answer, f"{mean_answer:,.0f} tokens an answer, as given"
    elif answered:
        mean = counts.output_tokens / answered
        basis = f"{mean:,.0f} tokens an answer, as in the {answered:,} that the run has"
    else:
        mean = settings.generate.max_new_tokens
        basis = f"at most {mean:,.0f} tokens an answer (generate.max_new_tokens)"
    prompts = sum(chunk.count for chunk in left)
    tokens = round(prompts * mean)
    return Estimate(
        prompts=prompts,
        chunks=len(chunks),
        done_chunks=len(chunks) - len(left),
        prompt_tokens=sum(_prompt_tokens(run, source, left) for source in {chunk.source for chunk in left}),
        answer_tokens=tokens,
        basis=basis,
        hours=tokens / tokens_per_second / 3600 if tokens_per_second else None,
    )


def _prompt_tokens(run: Run, source: str, chunks: list[Chunk]) -> int:
    lengths = []
    with pq.ParquetFile(run.prompts(source)) as file:
        for batch in file.iter_batches(columns=["input_ids"]):
            lengths += pc.list_value_length(batch["input_ids"]).to_pylist()
    of_source = [chunk for chunk in chunks if chunk.source == source]
    return sum(sum(lengths[chunk.first : chunk.first + chunk.count]) for chunk in of_source)
