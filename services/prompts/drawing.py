"""The second half of preparing a source: its rows are drawn in the order of their ranks until the quota is full."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from services.prompts.accounts import SourceCounts, bucket
from services.prompts.parallel import Processes
from services.prompts.progress import Progress
from services.prompts.ranking import Indices, name_of, ranked
from services.prompts.scanning import Candidates
from services.prompts.taken import Taken
from services.prompts.tasks import Drawn, DrawTask, Shared, draw, unpack_texts
from services.records import Prompt
from services.settings import SourceSettings

DRAWN_AT_ONCE = 128
DRAWN_BYTES = 4 * 2**20


def draw_prompts(
    source: SourceSettings,
    candidates: Candidates,
    pool: Processes[Shared],
    taken: Taken,
    counts: SourceCounts,
    progress: Progress,
) -> Iterator[Prompt]:
    """Prompts in the order of their ranks until the quota is full, those held out first, counted as they are taken.

    Of a group that has a prompt held out none is generated for: a rewrite of it would be known.
    """
    rows = ranked(candidates.records, taken.of_run, taken.of_corpus, source.group_by is not None)
    counts.duplicates.update(rows.duplicates)
    wanted = source.held_out + source.quota
    held_out_groups: set[int] = set()
    decided = 0
    for batch in pool.map(draw, _draw_tasks(source, candidates, rows.order)):
        for index, drawn in batch:
            if counts.held_out + counts.kept == wanted:
                break
            decided += 1
            row = candidates.records[index]
            if drawn.dropped == "rejected":
                counts.reject(Path(counts.files[row["file"]]), int(row["row"]), drawn.detail)
            elif drawn.dropped == "contaminated":
                counts.contaminated[drawn.detail] += 1
            elif drawn.dropped == "over_length":
                counts.over_length += 1
            elif counts.held_out == source.held_out and int(row["group"]) in held_out_groups:
                counts.duplicates["held_out_group"] += 1
            elif duplicate := taken.why(drawn):
                counts.duplicates[duplicate] += 1
            else:
                if counts.held_out < source.held_out:
                    held_out_groups.add(int(row["group"]))
                yield _take(source, row, candidates.read(index), drawn, taken, counts)
        if counts.held_out + counts.kept == wanted:
            break
        progress.drawn(source.name, counts.held_out + counts.kept)
    counts.not_needed = len(rows.order) - decided


def _draw_tasks(source: SourceSettings, candidates: Candidates, order: Indices) -> Iterator[DrawTask]:
    rows: list[tuple[int, bytes]] = []
    for index in map(int, order):
        rows.append((index, candidates.read(index)))
        if len(rows) == DRAWN_AT_ONCE or sum(len(packed) for _, packed in rows) > DRAWN_BYTES:
            yield DrawTask(source, rows)
            rows = []
    yield DrawTask(source, rows)


def _take(
    source: SourceSettings, row: np.void, packed: bytes, drawn: Drawn, taken: Taken, counts: SourceCounts
) -> Prompt:
    name = name_of(row)
    taken.of_run.add(name)
    tokens = len(drawn.input_ids)
    if counts.held_out < source.held_out:
        counts.held_out += 1
        counts.held_out_tokens += tokens
    else:
        counts.kept += 1
        counts.prompt_tokens += tokens
        counts.lengths[bucket(tokens)] += 1
    counts.tools_as_text += drawn.tools_as_text
    messages, tools = unpack_texts(packed)
    return Prompt(name, source.name, messages, tools, drawn.input_ids.tolist())
