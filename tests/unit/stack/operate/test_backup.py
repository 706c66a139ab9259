"""A backup that is not whole is none, and a restore that cannot be whole touches nothing."""

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from rich.console import Console

from services.errors import UserError
from services.stack.operate.backup import back_up, restore
from services.stack.operate.project import Project

Engine = Callable[[str], Path]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A `docker` that answers as the lines of a shell `case` say, by its arguments; returns the file of its calls."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def answering(cases: str) -> Path:
        calls, script = tmp_path / "calls", tmp_path / "bin" / "docker"
        calls.touch()
        script.write_text(f'#!/bin/sh\necho "$*" >> {calls}\ncase "$*" in\n{cases}\nesac\n')
        script.chmod(0o755)
        return calls

    return answering


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / ".env").write_text("VERSION=dev\n")
    return Project(tmp_path, tmp_path / ".env", "dflash-no-such", {})


def saved(folder: Path, content: bytes) -> Path:
    """A backup of these bytes."""
    folder.mkdir()
    (folder / "runs.tar").write_bytes(content)
    manifest = {"project": "p", "bytes": len(content), "sha256": sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_an_engine_that_goes_away_in_the_middle_leaves_no_backup(project: Project, engine: Engine) -> None:
    # Compose's own failures end with 1, as tar does when a file grew while it was read.
    engine("*'du --'*) echo '10 /runs';; *'tar --create'*) printf half; echo 'error: gone' >&2; exit 1;;")
    with pytest.raises(UserError, match="gone"):
        back_up(project, project.folder / "backups", Console())
    assert not list((project.folder / "backups").glob("*/manifest.json"))


def test_a_backup_has_the_runs_and_env_and_says_what_it_holds(project: Project, engine: Engine) -> None:
    engine("*'du --'*) echo '10 /runs';; *'tar --create'*) printf whole;;")
    folder = back_up(project, project.folder / "backups", Console())
    assert (folder / "runs.tar").read_bytes() == b"whole"
    assert (folder / ".env").read_text() == "VERSION=dev\n"
    assert json.loads((folder / "manifest.json").read_text())["sha256"] == sha256(b"whole").hexdigest()


def test_a_backup_that_does_not_fit_is_not_begun(project: Project, engine: Engine) -> None:
    calls = engine("*'du --'*) echo '1000000000000000 /runs';;")
    with pytest.raises(UserError, match="GB are free; name another --to"):
        back_up(project, project.folder / "backups", Console())
    assert "tar --create" not in calls.read_text()


@pytest.mark.parametrize("replace", [False, True])
def test_a_restore_that_does_not_fit_removes_nothing(project: Project, engine: Engine, replace: bool) -> None:
    calls = engine("*'run.json'*) echo /runs/old/run.json;; *'df --'*) printf '5\\n4\\n';;")
    folder = saved(project.folder / "saved", b"more than nine bytes")
    with pytest.raises(UserError, match="there are runs: old" if not replace else r"are free in the volume"):
        restore(project, folder, replace, Console())
    for word in ("-delete", "tar --extract", "down"):
        assert word not in calls.read_text()


def test_a_damaged_backup_is_refused(project: Project, engine: Engine) -> None:
    calls = engine("*) ;;")
    folder = saved(project.folder / "saved", b"whole")
    (folder / "runs.tar").write_bytes(b"rotten")
    with pytest.raises(UserError, match="sha256 differs"):
        restore(project, folder, False, Console())
    with pytest.raises(UserError, match="is no backup"):
        restore(project, project.folder, False, Console())
    assert calls.read_text() == ""
