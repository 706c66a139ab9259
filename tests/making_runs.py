"""Runs with prompts of given ids, for tests that generate."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.chunks import Chunk, find_chunk
from services.files import publish_json
from services.records import Prompt, write_prompts
from services.runs import Run, create_run
from services.settings import Settings

VOCABULARY = 100

MakeRun = Callable[..., tuple[Run, Chunk, Settings]]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes the run `r` with the given prompts (ids) in chunks, and settings for `generate`."""

    def make(
        prompts: list[list[int]],
        target: Path | None = None,
        messages: list[dict[str, str]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        chunks: int = 1,
        **generate: object,
    ) -> tuple[Run, Chunk, Settings]:
        if target is None:
            target = tmp_path / "target"
            target.mkdir()
            (target / "config.json").write_text(f'{{"vocab_size": {VOCABULARY}}}')
        settings = Settings.model_validate(
            {
                "target": {"path": target, "served_name": "target", "context_length": 512},
                "sources": [
                    {"name": "s", "files": ["s"], "adapter": "turns", "column": "c", "domain": "code", "quota": 1}
                ],
                "render": {"max_prompt_tokens": 256},
                "generate": {"max_new_tokens": 64, "concurrency": 8, **generate},
                "assemble": {"max_length": 512},
                "train": {"steps": 1, "draft": {"mask_token_id": 3}},
            }
        )
        run = create_run(tmp_path / "runs", "r", settings)
        said, given = json.dumps(messages or []), json.dumps(tools) if tools else None
        rows = [Prompt(f"p{number}", "s", said, given, ids) for number, ids in enumerate(prompts)]
        run.prompts("s").parent.mkdir(parents=True)
        write_prompts(run.prompts("s"), rows)
        count = len(rows) // chunks
        planned = [
            {"chunk": f"s-{number}", "source": "s", "first": number * count, "count": count} for number in range(chunks)
        ]
        publish_json(run.chunks, {"chunks": planned})
        publish_json(run.prepared, {})
        return run, find_chunk(run, "s-0"), settings

    return make
