"""What is published is whole, and the first writer's."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.files import publish, publish_folder, publish_json, read_json, replace_json

RACE = """
import sys, time
from pathlib import Path
from services.files import publish
final, start, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

def write(path):
    with path.open("w") as stream:
        for _ in range(50):
            stream.write(name * 1000)

print("ready", flush=True)
while not start.exists():
    time.sleep(0.0005)
print(publish(final, write))
"""

HANG_HALFWAY = """
import sys, time
from pathlib import Path
from services import files

def write_file(path):
    path.write_text("half")
    print("ready", flush=True)
    time.sleep(60)

def fill(folder):
    write_file(folder / "half")

getattr(files, sys.argv[2])(Path(sys.argv[1]), fill if sys.argv[2] == "publish_folder" else write_file)
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def write_text(text: str) -> Callable[[Path], None]:
    return lambda path: (path.write_text(text), None)[1]


def test_the_first_of_two_racing_processes_publishes_and_the_other_is_told(tmp_path: Path) -> None:
    final = tmp_path / "result"
    start = tmp_path / "start"
    racers = {name: python(RACE, final, start, name) for name in "ab"}
    start.touch()
    told = {name: racer.communicate(timeout=30)[0].strip() for name, racer in racers.items()}

    assert sorted(told.values()) == ["False", "True"]
    winner = next(name for name, answer in told.items() if answer == "True")
    assert final.read_text() == winner * 50_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result", "start"]


@pytest.mark.parametrize("how", ["publish", "publish_folder"])
def test_a_writer_killed_halfway_publishes_nothing_and_its_place_is_free(tmp_path: Path, how: str) -> None:
    final = tmp_path / "result"
    process = python(HANG_HALFWAY, final, how)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)

    assert not final.exists()
    assert publish_folder(final, lambda folder: write_text("whole")(folder / "file"))
    assert (final / "file").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


@pytest.mark.parametrize("how", ["publish", "publish_folder"])
def test_a_living_writer_keeps_what_it_writes_while_another_publishes(tmp_path: Path, how: str) -> None:
    final = tmp_path / "result"
    process = python(HANG_HALFWAY, final, how)
    try:
        assert publish(final, write_text("whole"))
        assert len(list(tmp_path.glob(".result.*.tmp"))) == 1
    finally:
        process.kill()
        process.wait(timeout=30)
    assert not publish(final, write_text("again"))
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


def test_a_published_file_is_never_written_again(tmp_path: Path) -> None:
    final = tmp_path / "result"
    assert publish(final, write_text("first"))
    assert not publish(final, write_text("second"))
    assert final.read_text() == "first"


def test_a_published_folder_is_never_written_again(tmp_path: Path) -> None:
    final = tmp_path / "result"
    assert publish_folder(final, lambda folder: write_text("first")(folder / "file"))
    assert not publish_folder(final, lambda folder: write_text("second")(folder / "file"))
    assert (final / "file").read_text() == "first"


@pytest.mark.parametrize("publish_it", [publish, publish_folder])
def test_a_writer_that_fails_leaves_nothing_behind(tmp_path: Path, publish_it: Callable[..., bool]) -> None:
    def write(path: Path) -> None:
        write_text("half")(path / "file" if path.is_dir() else path)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish_it(tmp_path / "result", write)
    assert list(tmp_path.iterdir()) == []


def test_publishing_makes_the_folders_it_needs(tmp_path: Path) -> None:
    assert publish_json(tmp_path / "a" / "b" / "result.json", {"text": "größer"})
    assert read_json(tmp_path / "a" / "b" / "result.json") == {"text": "größer"}


def test_a_replacing_file_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = os.fsync, Path.replace

    def noted_sync(descriptor: int) -> None:
        done.append("sync")
        sync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_rename)
    replace_json(tmp_path / "run.json", {"settings": {}})
    assert done == ["sync", "rename"]
