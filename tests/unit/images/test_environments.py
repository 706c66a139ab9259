from pathlib import Path

import pytest

from services import environments
from services.environments import CannotMakeError, Environment, interpreter, is_whole, make, make_all


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one environment, whose lock asks for nothing."""
    (tmp_path / "empty.lock").write_text("# nothing\n")
    monkeypatch.setattr(environments, "KNOWN", {"room": Environment("empty.lock", 1, project=True)})
    return tmp_path


@pytest.mark.slow
def test_made_once_and_again_when_its_lock_changes(root: Path) -> None:
    assert make("room", root) > 0
    python = interpreter("room", root)
    made = python.parent.stat().st_ctime_ns
    assert make("room", root) == 0
    assert python.parent.stat().st_ctime_ns == made

    (root / "empty.lock").write_text("# still nothing\n")
    assert make("room", root) > 0
    assert python.parent.stat().st_ctime_ns != made


@pytest.mark.slow
def test_interrupted_one_is_made_anew(root: Path) -> None:
    leftover = root / ".envs/room/bin/half-written"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    assert not is_whole(root / ".envs/room", root / "empty.lock")
    assert make("room", root) > 0
    assert not leftover.exists()
    assert is_whole(root / ".envs/room", root / "empty.lock")


@pytest.mark.slow
def test_failure_is_one_line_and_leaves_nothing_that_counts_as_whole(root: Path) -> None:
    (root / "empty.lock").write_text("rq==3.0.0\n")  # no hash
    with pytest.raises(CannotMakeError, match=r"^environment room was not made: .*hash.*room\.log\)$"):
        make("room", root)
    assert not is_whole(root / ".envs/room", root / "empty.lock")


def test_too_little_disk_is_told_before_anything_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environments.KNOWN, "room", Environment("empty.lock", 10**12, project=False))
    with pytest.raises(CannotMakeError, match=r"needs 1000000000\.0 GB for room"):
        make_all(["room"], root)
    assert not (root / ".envs").exists()


def test_other_python_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "PYTHON", (3, 10))
    with pytest.raises(CannotMakeError, match=r"are for Python 3\.10 and this is 3\.11: call python3\.10"):
        make_all(["room"], root)
