"""How a run's prompts are cut into chunks: the unit of work, which a job names, and of publishing."""

from collections import Counter
from dataclasses import asdict, dataclass

from services.errors import UserError
from services.files import publish_json, read_json
from services.runs import Run
from services.settings import Settings


@dataclass(frozen=True)
class Chunk:
    """A row range of one source's prompts: the unit of generating and of publishing."""

    chunk: str
    source: str
    first: int
    count: int


def plan_chunks(run: Run, settings: Settings) -> list[Chunk]:
    """Cut the prepared prompts into chunks, source by source, and publish them: equal prompts give equal chunks.

    Raises:
        UserError: the prompts are not prepared.
    """
    if not run.prepared.is_file():
        raise UserError(
            f"run {run.name} has no {run.prepared}; its prompts are not prepared, see `dflash-stack prepare`"
        )
    # Arrow's import takes longer than all else here, and whoever only reads the plan needs none of it.
    import pyarrow.parquet as pq

    size = settings.generate.chunk_size
    planned = [
        Chunk(f"{source.name}-{first // size:05d}", source.name, first, min(size, prompts - first))
        for source in settings.sources
        for prompts in [pq.read_metadata(run.prompts(source.name)).num_rows]
        for first in range(0, prompts, size)
    ]
    publish_json(run.chunks, {"chunks": [asdict(chunk) for chunk in planned]})
    return read_chunks(run)


def read_chunks(run: Run) -> list[Chunk]:
    """The run's chunks, in order; empty before `submit`."""
    if not run.chunks.is_file():
        return []
    return [Chunk(**chunk) for chunk in read_json(run.chunks)["chunks"]]


def find_chunk(run: Run, name: str) -> Chunk:
    """Raises UserError when the run has no such chunk."""
    for chunk in read_chunks(run):
        if chunk.chunk == name:
            return chunk
    raise UserError(f"run {run.name} has no chunk {name!r} in {run.chunks}; enqueue with `dflash-stack submit`")


def choose(run: Run, sources: list[str] | None, limit: int | None) -> list[Chunk]:
    """Whole chunks of these sources in turn, up to `limit` prompts, and at least one; None: all."""
    chunks = [chunk for chunk in read_chunks(run) if sources is None or chunk.source in sources]
    if limit is None:
        return chunks
    places: Counter[str] = Counter()
    turns = {}
    for chunk in chunks:
        turns[chunk.chunk] = places[chunk.source]
        places[chunk.source] += 1
    chosen: list[Chunk] = []
    prompts = 0
    for chunk in sorted(chunks, key=lambda chunk: turns[chunk.chunk]):
        if chosen and prompts + chunk.count > limit:
            break
        chosen.append(chunk)
        prompts += chunk.count
    return chosen
