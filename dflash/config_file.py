"""Configuration files, and what is wrong with one in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from dflash.errors import DflashError

ConfigType = TypeVar("ConfigType", bound=BaseModel)


def load_config(path: Path, kind: type[ConfigType]) -> ConfigType:
    """Read a JSON or YAML file as `kind`. Raises DflashError in one line naming every wrong key."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError as error:
        raise DflashError(f"{path}: no such configuration file") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DflashError(f"{path}: not readable as JSON or YAML ({' '.join(str(error).split())})") from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise DflashError(f"{path}: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """Return a pydantic error as one line: each wrong key and what is wrong with it."""
    parts = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        what = "no such key" if item["type"] == "extra_forbidden" else item["msg"]
        parts.append(f"{where}: {what}" if where else what)
    return "; ".join(parts)
