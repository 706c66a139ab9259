"""A run whose chunk is generated, to be assembled and merged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.chat import tokenizer_fingerprint
from services.ledger import plan_chunks
from services.records import Completion, Prompt, write_completions, write_prompts
from services.runs import Run, create_run, publish, publish_json
from services.settings import Settings

Generated = Callable[..., tuple[Run, Settings]]


@pytest.fixture
def make_generated(tmp_path: Path, target_path: Path, make_settings: Callable[..., Settings]) -> Generated:
    """A run of one source with the given answers, 3 to a chunk; each prompt has the ids 1, 2 and its own number."""

    def make(*answers: dict[str, Any], base: Path | None = None, max_length: int = 320) -> tuple[Run, Settings]:
        settings = make_settings(
            target={"path": str(target_path), "served_name": "target", "context_length": 512},
            assemble={"max_length": max_length},
            merge={"base": str(base) if base else None},
        )
        run = create_run(tmp_path / "runs", "run", settings)
        prompts = [Prompt(f"p{number}", "questions", "[]", None, [1, 2, number]) for number in range(len(answers))]
        publish(run.prompts("questions"), lambda path: write_prompts(path, prompts))
        publish_json(run.prepared, {"tokenizer": tokenizer_fingerprint(target_path)})
        for chunk in plan_chunks(run, settings):
            completions = [
                completion(f"p{number}", **answers[number]) for number in range(chunk.first, chunk.first + chunk.count)
            ]
            publish(run.completions(chunk.chunk), lambda path, rows=completions: write_completions(path, rows))  # type: ignore[misc]
        return run, settings

    return make


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
