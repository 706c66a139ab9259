"""A run whose chunk is generated, to be assembled and merged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.chunks import plan_chunks
from services.files import publish, publish_json
from services.records import Completion, Prompt, write_completions, write_prompts
from services.runs import Run, create_run
from services.settings import Settings
from services.target import tokenizer_fingerprint, vocabulary_size

Generated = Callable[..., tuple[Run, Settings]]


@pytest.fixture
def make_generated(tmp_path: Path, target_path: Path, make_settings: Callable[..., Settings]) -> Generated:
    """A run of one source with the given answers, 3 to a chunk; each prompt has the ids 1, 2 and its own number."""

    def make(
        *answers: dict[str, Any],
        name: str = "run",
        base: Path | None = None,
        assemble: dict[str, Any] | None = None,
        merge: dict[str, Any] | None = None,
    ) -> tuple[Run, Settings]:
        settings = make_settings(
            target={"path": str(target_path), "served_name": "target", "context_length": 512},
            assemble={"max_length": 320, **(assemble or {})},
            merge={"base": str(base) if base else None, "min_supervised_tokens": 1, "verify": True, **(merge or {})},
        )
        run = create_run(tmp_path / "runs", name, settings)
        prompts = [Prompt(f"p{number}", "questions", "[]", None, [1, 2, number]) for number in range(len(answers))]
        publish(run.prompts("questions"), lambda path: write_prompts(path, prompts))
        publish_json(run.prepared, prepared_with(target_path))
        for chunk in plan_chunks(run, settings):
            completions = [
                completion(f"p{number}", **answers[number]) for number in range(chunk.first, chunk.first + chunk.count)
            ]
            publish(run.completions(chunk.chunk), lambda path, rows=completions: write_completions(path, rows))  # type: ignore[misc]
        return run, settings

    return make


def prepared_with(target: Path) -> dict[str, Any]:
    """What later stages read of prepare.json."""
    return {
        "tokenizer": tokenizer_fingerprint(target),
        "template": "a template",
        "thinking": None,
        "vocabulary_size": vocabulary_size(target),
    }


def completion(prompt_id: str, **fields: Any) -> Completion:
    answer = {
        "status": "completed",
        "reason": None,
        "finish_reason": "stop",
        "output_ids": [7, 8],
        "attempts": 1,
        "seconds": 0.5,
        "server": None,
    }
    return Completion(prompt_id, **{**answer, **fields})
