import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).resolve().parents[3] / "images/check_versions.py"


def check(versions: Path, variant: str = "cpu") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECK), "stack", variant, str(versions)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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
