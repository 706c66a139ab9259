"""Append-only JSONL files that say what they belong to; a killed writer loses at most one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash.errors import DflashError


class Journal:
    """Records by key, on disk as soon as they are added."""

    def __init__(self, path: Path, identity: dict[str, Any], replace_other: bool) -> None:
        """Open or start the journal at `path`.

        Args:
            path: the file; its folder is made.
            identity: what the records depend on; JSON values only.
            replace_other: whether a journal of another identity is started anew. Otherwise DflashError names
                the differences.
        """
        self.path = path
        self.records: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _whole_lines(path)
        if lines and lines[0] != identity:
            if not replace_other:
                keys = sorted(
                    key for key in lines[0].keys() | identity.keys() if lines[0].get(key) != identity.get(key)
                )
                raise DflashError(f"{path}: was made with other settings ({', '.join(keys)}): choose another file")
            lines = []
        self.records = {line["key"]: line for line in lines[1:]}
        # Written whole again: a half line at the end would spoil the next one.
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(_text(line) for line in [identity, *lines[1:]]), encoding="utf-8")
        temporary.replace(path)

    def add(self, key: str, record: dict[str, Any]) -> dict[str, Any]:
        """Append `record` under `key` and return it as stored."""
        stored = {"key": key} | record
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_text(stored))
        self.records[key] = stored
        return stored


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
