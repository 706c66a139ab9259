import json
import shutil
import subprocess
import sys
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[3] / "images"


def check(versions: Path, variant: str = "cpu", *further: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(IMAGES / "check_versions.py"),
        "stack",
        variant,
        "--versions",
        str(versions),
        *further,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def start(contents: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs `start.py` as it lies in an image: beside what it compares with and what it needs."""
    for name in ("start.py", "check_versions.py"):
        shutil.copy(IMAGES / name, contents.parent)
    program = [sys.executable, str(contents.parent / "start.py"), *command]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def test_environment_as_it_must_be_passes(tmp_path: Path) -> None:
    versions = tmp_path / "versions.toml"
    versions.write_text('[stack.cpu]\npython = "3.11"\nrq = "3.0.0"\nabsent = ["torch"]\n')
    result = check(versions)
    assert (result.returncode, result.stderr) == (0, "")


def test_each_difference_is_a_line_with_both_versions(tmp_path: Path) -> None:
    versions = tmp_path / "versions.toml"
    versions.write_text('[stack.cpu]\nrq = "2.9.9"\ntorch = "2.10.0"\ncuda = "12.8"\nabsent = ["redis-not-there"]\n')
    result = check(versions)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "stack/cpu: rq: must be 2.9.9, is 3.0.0",
        "stack/cpu: torch: must be 2.10.0, is not here",
        "stack/cpu: cuda: must be 12.8, is not here",
    ]


def test_package_that_must_be_absent_is_named(tmp_path: Path) -> None:
    versions = tmp_path / "versions.toml"
    versions.write_text('[stack.cpu]\nabsent = ["rq"]\n')
    assert check(versions).stderr == "stack/cpu: rq: must not be here, is 3.0.0\n"


def test_unknown_variant_is_refused(tmp_path: Path) -> None:
    versions = tmp_path / "versions.toml"
    versions.write_text('[stack.cpu]\nrq = "3.0.0"\n')
    result = check(versions, "cu999")
    assert result.returncode == 2
    assert "there is no [stack.cu999]" in result.stderr


def test_container_starts_in_the_environment_that_was_built(tmp_path: Path) -> None:
    versions, contents = tmp_path / "versions.toml", tmp_path / "contents.json"
    versions.write_text('[stack.cpu]\npython = "3.11"\nrq = "3.0.0"\nabsent = ["torch"]\n')
    check(versions, "cpu", "--record", str(contents))
    result = start(contents, sys.executable, "-c", "import os; print('served by', os.getpid())")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("served by")


def test_container_refuses_to_start_when_a_version_was_moved(tmp_path: Path) -> None:
    versions, contents = tmp_path / "versions.toml", tmp_path / "contents.json"
    versions.write_text('[stack.cpu]\nrq = "3.0.0"\nabsent = ["torch"]\n')
    check(versions, "cpu", "--record", str(contents))
    recorded = json.loads(contents.read_text())
    recorded["expected"]["rq"] = "2.9.9"
    contents.write_text(json.dumps(recorded))
    result = start(contents, sys.executable, "-c", "print('served')")
    assert (result.returncode, result.stdout) == (1, "")
    first, second = result.stderr.splitlines()
    assert first == "stack/cpu: rq: must be 2.9.9, is 3.0.0"
    assert "not started" in second
    assert "Build it again" in second


def test_nothing_is_recorded_of_an_environment_that_differs(tmp_path: Path) -> None:
    versions, contents = tmp_path / "versions.toml", tmp_path / "contents.json"
    versions.write_text('[stack.cpu]\nrq = "2.9.9"\n')
    assert check(versions, "cpu", "--record", str(contents)).returncode == 1
    assert not contents.exists()
