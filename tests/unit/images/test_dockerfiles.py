import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = tomllib.loads((ROOT / "images/versions.toml").read_text())
DOCKERFILES = sorted(ROOT.glob("images/*/Dockerfile"))
LABELLED = ("sglang", "torch", "cuda", "transformers", "rq")


def labels(instructions: str) -> dict[str, str]:
    return dict(re.findall(r'dflash-stack\.([\w-]+)="([^"]*)"', instructions))


def stages(dockerfile: Path) -> dict[str, str]:
    """The text of each named stage."""
    found = re.split(r"^FROM \S+ AS (\S+)$", dockerfile.read_text(), flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


@pytest.mark.parametrize(
    ("image", "variant"), [(image, variant) for image, table in VERSIONS.items() for variant in table]
)
def test_labels_say_what_versions_toml_says(image: str, variant: str) -> None:
    text = stages(ROOT / f"images/{image}/Dockerfile")
    told = labels(text["runtime"]) | labels(text.get(variant, ""))
    expected = VERSIONS[image][variant]
    of_variant = {name: told[name] for name in told if name in LABELLED}
    assert of_variant == {name: expected[name] for name in of_variant}
    assert {name for name in ("sglang", "torch", "cuda", "transformers") if name in expected} <= set(of_variant)
    assert told["image"] == image


def test_all_images_have_one_base_by_exact_tag_and_digest() -> None:
    bases = {re.search(r"^ARG BASE_IMAGE=(\S+)$", path.read_text(), flags=re.MULTILINE)[1] for path in DOCKERFILES}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", bases.pop())


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_no_image_runs_as_root_or_starts_without_comparing_its_versions(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    entries = re.findall(r"^ENTRYPOINT (.*)$", text, flags=re.MULTILINE)
    assert all(entry.startswith('["dumb-init", "python", "/opt/image/start.py", "python", ') for entry in entries)
    assert len(re.findall(r"^USER 10001:10001$", text, flags=re.MULTILINE)) == len(entries) > 0
