import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = tomllib.loads((ROOT / "images/versions.toml").read_text())
LOCKS = sorted(
    [*ROOT.glob("images/**/*.lock"), ROOT / "services/stack/requirements.lock", ROOT / "tests/requirements.lock"]
)


def pins(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), flags=re.MULTILINE))


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


@pytest.mark.parametrize(
    ("image", "variant"), [(image, variant) for image, table in VERSIONS.items() for variant in table]
)
def test_lock_holds_what_versions_toml_says(image: str, variant: str) -> None:
    expected = VERSIONS[image][variant]
    locked = pins(ROOT / f"images/{image}/{variant}.lock")
    named = {k: v for k, v in expected.items() if k not in {"python", "cuda", "absent"}}
    assert {name: locked.get(name) for name in named} == named
    assert not set(expected["absent"]) & set(locked)


def test_trainer_on_cuda_12_holds_no_library_of_another_cuda() -> None:
    assert not [name for name in pins(ROOT / "images/trainer/cu128.lock") if name.endswith("-cu13")]


def test_compiler_and_headers_of_the_gpu_server_are_of_one_minor_version() -> None:
    locked = pins(ROOT / "images/sglang/cu130.lock")
    parts = ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime", "nvidia-nvvm"]
    assert {locked[part].rpartition(".")[0] for part in parts} == {VERSIONS["sglang"]["cu130"]["cuda"]}
