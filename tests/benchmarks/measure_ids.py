"""Prompt ids and generated ids to samples, masked and written: ROWS PROMPT_TOKENS GENERATED_TOKENS OUTPUT."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from services.records import SAMPLE_SCHEMA, TOKEN_IDS
from services.settings import AssembleSettings
from services.tokenizer.assemble import ChunkCounts, choose, join
from tests.benchmarks.measured import measured_here, tell

ROWS_A_CHUNK = 128


def _ids(rows: int, tokens: int) -> pa.Array:
    values = np.random.default_rng(tokens).integers(0, 150_000, rows * tokens, dtype=np.int32)
    return pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * tokens, values).cast(TOKEN_IDS)


def main() -> None:
    rows, asked, generated = map(int, sys.argv[1:4])
    output = Path(sys.argv[4])
    names = [f"{row:032x}" for row in range(ROWS_A_CHUNK)]
    prompts = pa.table({"prompt_id": names, "input_ids": _ids(ROWS_A_CHUNK, asked)})
    ended = {"status": ["completed"] * ROWS_A_CHUNK, "finish_reason": ["stop"] * ROWS_A_CHUNK}
    completions = pa.table({"prompt_id": names, **ended, "output_ids": _ids(ROWS_A_CHUNK, generated)})
    settings = AssembleSettings(max_length=asked + generated)

    def work() -> int:
        tokens = 0
        for chunk in range(rows // ROWS_A_CHUNK):
            counts = ChunkCounts(f"c-{chunk}", "synthetic")
            kept = choose(prompts, completions, settings, counts)
            with pa.ipc.new_stream(str(output / f"{chunk}.arrow"), SAMPLE_SCHEMA) as writer:
                for batch in join(prompts, completions, kept):
                    writer.write_batch(batch)
            tokens += counts.tokens
        return tokens

    tell(measured_here(work))


if __name__ == "__main__":
    main()
