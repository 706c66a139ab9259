"""A synthetic corpus and run of any size, written as the pipeline writes them."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from services.dataset_folder import write_shards, write_state
from services.files import publish_json
from services.records import PROVENANCE_SCHEMA, SAMPLE_SCHEMA
from services.runs import Run, create_run
from services.settings import check_settings

VOCABULARY = 151_936
ROWS_A_CHUNK = 128
ROWS_A_BATCH = 1000


def make_batch(random: np.random.Generator, rows: int, tokens: int) -> pa.RecordBatch:
    """Rows of `tokens` tokens on average, the last half of each supervised."""
    lengths = random.integers(tokens // 2, tokens + tokens // 2, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = random.integers(0, VOCABULARY, offsets[-1], dtype=np.int32)
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = (places >= np.repeat(lengths // 2, lengths)).astype(np.int8)
    columns = [pa.ListArray.from_arrays(offsets, values) for values in (ids, mask)]
    return pa.RecordBatch.from_arrays([*columns, pa.array(lengths.astype(np.int32))], schema=SAMPLE_SCHEMA)


def make_corpus(folder: Path, rows: int, tokens: int) -> None:
    """A dataset folder, unless it is there."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    batches = (make_batch(random, min(ROWS_A_BATCH, rows - first), tokens) for first in range(0, rows, ROWS_A_BATCH))
    shards = write_shards(folder, SAMPLE_SCHEMA, (pa.Table.from_batches([batch]) for batch in batches))
    write_state(folder, shards, "synthetic")


def make_run(runs: Path, rows: int, tokens: int) -> Run:
    """A run whose chunks are assembled, unless it is there."""
    run = Run(runs / "new")
    if run.prepared.exists():
        return run
    random = np.random.default_rng(1)
    source = {"name": "synthetic", "files": ["none.jsonl"], "adapter": "question", "column": "q"}
    settings = check_settings(
        {
            "target": {"path": "none", "served_name": "none", "context_length": 4096},
            "sources": [{**source, "domain": "general", "quota": rows}],
            "render": {"max_prompt_tokens": 1024},
            "generate": {"max_new_tokens": 1024},
            "assemble": {"max_length": 4096},
            "train": {"steps": 1, "draft": {"mask_token_id": 0}},
        },
        where="benchmark",
    )
    create_run(runs, "new", settings)
    run.samples("").parent.mkdir()
    chunks = []
    for first in range(0, rows, ROWS_A_CHUNK):
        name, count = f"synthetic-{first // ROWS_A_CHUNK:05d}", min(ROWS_A_CHUNK, rows - first)
        chunks.append({"chunk": name, "source": "synthetic", "first": first, "count": count})
        batch = make_batch(random, count, tokens)
        with pa.ipc.new_stream(str(run.samples(name)), SAMPLE_SCHEMA) as writer:
            writer.write_batch(batch)
        supervised = [int(np.sum(mask.values.to_numpy())) for mask in batch.column("loss_mask")]
        values = {
            "prompt_id": [f"{first + row:032x}" for row in range(count)],
            "tokens": batch.column("seq_len").to_pylist(),
            "supervised_tokens": supervised,
            **{
                column: [text] * count
                for column, text in {
                    "source": "synthetic",
                    "domain": "general",
                    "finish_reason": "stop",
                    "model": "m" * 64,
                    "template": "t" * 64,
                    "thinking": None,
                }.items()
            },
        }
        arrays = [pa.array(values[field.name], field.type) for field in PROVENANCE_SCHEMA]
        with pa.ipc.new_stream(str(run.provenance(name)), PROVENANCE_SCHEMA) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=PROVENANCE_SCHEMA))
        total = {"samples": count, "tokens": sum(values["tokens"]), "supervised_tokens": sum(supervised)}
        run.assembled(name).write_text(f"{total}".replace("'", '"'))
    publish_json(run.chunks, {"chunks": chunks})
    publish_json(run.prepared, {"tokenizer": "t", "template": "t", "vocabulary_size": VOCABULARY, "thinking": None})
    return run
