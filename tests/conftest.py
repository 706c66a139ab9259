"""What tests of several rooms share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from services.settings import Settings, check_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = Path(__file__).parents[1] / "var" / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def target_path() -> Path:
    """The small real target; DFLASH_TEST_TARGET names another place of it."""
    path = Path(os.environ.get("DFLASH_TEST_TARGET", MODEL))
    if not (path / "config.json").is_file():
        pytest.fail(f"no target model at {path}: run `make materials`, or set DFLASH_TEST_TARGET")
    return path


@pytest.fixture(scope="session")
def tokenizer(target_path: Path) -> "PreTrainedTokenizerBase":
    """The small real target's tokenizer, for tests in an environment that has transformers."""
    from services.chat import load_tokenizer

    return load_tokenizer(target_path)


@pytest.fixture
def settings_content(tmp_path: Path) -> dict[str, Any]:
    """The content of a small valid configuration file, to be changed at will."""
    return {
        "target": {"path": str(tmp_path / "target"), "served_name": "target", "context_length": 512},
        "sources": [
            {
                "name": "questions",
                "files": [str(tmp_path / "questions.jsonl")],
                "adapter": "question",
                "column": "question",
                "domain": "general",
                "quota": 4,
            }
        ],
        "render": {"max_prompt_tokens": 256},
        "generate": {"max_new_tokens": 64, "chunk_size": 3},
        "assemble": {"max_length": 320},
        "train": {"steps": 1, "draft": {"mask_token_id": 0}},
    }


@pytest.fixture
def make_settings(settings_content: dict[str, Any]) -> Callable[..., Settings]:
    """Settings with whole sections replaced: `make_settings(merge={"base": ...})`."""
    return lambda **sections: check_settings({**settings_content, **sections}, where="test")
