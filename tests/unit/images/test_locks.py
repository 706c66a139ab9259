import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from images.check_locks import pins

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = tomllib.loads((ROOT / "images/versions.toml").read_text())
LOCKS = sorted(
    [*ROOT.glob("images/**/*.lock"), ROOT / "services/stack/requirements.lock", ROOT / "tests/requirements.lock"]
)


def pinned(name: str) -> dict[str, str]:
    return pins((ROOT / "images" / name).read_text())


def check_locks(images: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "images/check_locks.py"), str(images)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A folder `images` with the trainer's cu128 lock and its table alone."""
    (tmp_path / "trainer").mkdir()
    shutil.copy(ROOT / "images/trainer/cu128.lock", tmp_path / "trainer")
    table = (ROOT / "images/versions.toml").read_text().partition("[trainer.cu128]")[2].partition("\n\n")[0]
    (tmp_path / "versions.toml").write_text(f"[trainer.cu128]{table}\n")
    assert check_locks(tmp_path).returncode == 0
    return tmp_path


def test_every_variant_has_a_lock_and_every_lock_a_variant() -> None:
    variants = {f"{image}/{variant}" for image, table in VERSIONS.items() for variant in table}
    assert variants == {f"{lock.parent.name}/{lock.stem}" for lock in ROOT.glob("images/*/*.lock")}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: str(lock.relative_to(ROOT)))
def test_lock_pins_and_hashes_everything_and_names_no_place(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    assert not re.search(r"(^|\s)(/|--index|--find|--extra|-e |-i )", text, flags=re.MULTILINE)
    for requirement in re.split(r"\n(?=\S)", text.strip()):
        assert re.fullmatch(r"[\w.-]+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", requirement), requirement


def test_locks_hold_what_versions_toml_says() -> None:
    result = check_locks(ROOT / "images")
    assert (result.returncode, result.stdout) == (0, "")


def test_lock_that_moves_torch_and_cuda_alone_is_refused_with_both_versions(trainer: Path) -> None:
    lock = trainer / "trainer/cu128.lock"
    moved = lock.read_text().replace("torch==2.10.0", "torch==2.11.0")
    moved = re.sub(r"nvidia-cuda-runtime-cu12==\S+", "nvidia-cuda-runtime==13.0.96", moved)
    lock.write_text(moved)
    result = check_locks(trainer)
    assert result.returncode == 1
    assert result.stdout.splitlines()[:2] == [
        "trainer/cu128: torch: versions.toml says 2.10.0, the lock has 2.11.0",
        "trainer/cu128: cuda: versions.toml says 12.8, the lock has 13.0",
    ]


def test_lock_that_moves_torch_is_accepted_when_versions_toml_says_so(trainer: Path) -> None:
    for file in (trainer / "trainer/cu128.lock", trainer / "versions.toml"):
        file.write_text(
            file.read_text().replace("torch==2.10.0", "torch==2.10.1").replace('torch = "2.10.0"', 'torch = "2.10.1"')
        )
    assert check_locks(trainer).returncode == 0


def test_torch_that_versions_toml_does_not_mention_is_refused(trainer: Path) -> None:
    versions = trainer / "versions.toml"
    versions.write_text(re.sub(r"^(torch|cuda) = .*\n", "", versions.read_text(), flags=re.MULTILINE))
    assert check_locks(trainer).stdout.splitlines()[:2] == [
        "trainer/cu128: torch: the lock has 2.10.0, and versions.toml does not say so",
        "trainer/cu128: cuda: the lock has 12.8, and versions.toml does not say so",
    ]


def test_package_that_must_be_absent_is_refused(trainer: Path) -> None:
    with (trainer / "trainer/cu128.lock").open("a") as lock:
        lock.write("sglang==0.5.23 \\\n    --hash=sha256:" + "0" * 64 + "\n")
    assert "trainer/cu128: sglang: must not be in it, is 0.5.23" in check_locks(trainer).stdout


def test_variant_without_a_lock_is_named(trainer: Path) -> None:
    (trainer / "trainer/cu128.lock").unlink()
    assert check_locks(trainer).stdout.startswith("trainer/cu128: there is no cu128.lock: make lock\n")


@pytest.mark.parametrize("variant", ["cu128", "cu128-2.11.0"])
def test_trainer_on_cuda_12_holds_no_library_of_another_cuda(variant: str) -> None:
    locked = pinned(f"trainer/{variant}.lock")
    assert not [name for name in locked if name.endswith("-cu13") or name == "nvidia-cuda-runtime"]


@pytest.mark.parametrize("variant", ["cu130", "cu130-0.5.12"])
def test_compiler_and_headers_of_the_gpu_server_are_of_one_minor_version(variant: str) -> None:
    locked = pinned(f"sglang/{variant}.lock")
    parts = ["cuda-nvcc", "cuda-crt", "cuda-cccl", "cuda-runtime", "cuda-nvrtc", "nvvm"]
    cuda = VERSIONS["sglang"][variant]["cuda"]
    assert {locked[f"nvidia-{part}"].rpartition(".")[0] for part in parts} == {cuda}
    assert "ninja" in locked
