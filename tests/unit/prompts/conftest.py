"""What tests of preparing share."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from services.prompts.prepare import prepare_run
from services.runs import Run, create_run
from services.settings import Settings


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines; a text is a line as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def prepare_rows(
    tmp_path: Path,
    target_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    settings_content: dict[str, Any],
    make_settings: Callable[..., Settings],
) -> Callable[..., tuple[Run, dict[str, Any]]]:
    """Prepare a new run of sources given as name -> rows and settings; more keywords are sections of the settings."""

    def prepare(
        name: str = "run", processes: int = 1, sources: dict[str, dict[str, Any]] | None = None, **sections: Any
    ) -> tuple[Run, dict[str, Any]]:
        content = []
        for source, keys in (sources or {}).items():
            keys = dict(keys)
            path = write_lines(tmp_path / f"{source}.jsonl", keys.pop("rows")) if "rows" in keys else None
            files = [str(path)] if path else keys.pop("files")
            content.append({**settings_content["sources"][0], "name": source, "files": files, **keys})
        settings = make_settings(
            target={"path": str(target_path), "served_name": "target", "context_length": 512},
            sources=content,
            **sections,
        )
        run = create_run(tmp_path / "runs", name, settings)
        return run, prepare_run(run, settings, tokenizer, processes)

    return prepare
