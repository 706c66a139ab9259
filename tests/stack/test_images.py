"""The cpu images: what they hold, what they do not, and that one that was tampered with does not start."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
IMAGES = ("producer", "tokenizer", "trainer", "sglang")
README_SIZES = r"images take at most (.*?)\.(?=\s)"


def docker(*arguments: str, standard_input: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["docker", *arguments]
    return subprocess.run(command, cwd=ROOT, input=standard_input, capture_output=True, text=True, check=False)


def inspect(tag: str) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(docker("image", "inspect", tag).stdout)[0]
    return described


@pytest.fixture(scope="module", params=IMAGES)
def image(request: pytest.FixtureRequest) -> str:
    """The tag of an image, built from the same layers as compose builds."""
    name = str(request.param)
    tag = f"dflash-stack/{name}:cpu-images-test"
    base = [f"--build-arg=BASE_IMAGE={os.environ['BASE_IMAGE']}"] if "BASE_IMAGE" in os.environ else []
    wheelhouse = os.environ.get("WHEELHOUSE", "images/wheelhouse")
    built = docker(
        "buildx", "build", "--tag", tag, "--file", f"images/{name}/Dockerfile", *base, "--build-arg=VARIANT=cpu",
        "--build-context", f"wheelhouse={wheelhouse}", ".",
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-6000:]
    return tag


def test_size_is_within_what_the_readme_states(image: str) -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    (stated,) = re.findall(README_SIZES, text)
    limits = {name: float(size) for size, name in re.findall(r"([\d.]+) GB \((\w+)\)", f"{stated}.")}
    assert set(limits) == set(IMAGES)
    name = image.partition("/")[2].partition(":")[0]
    assert inspect(image)["Size"] / 1e9 <= limits[name]


def test_neither_history_nor_environment_holds_a_secret_or_an_index(image: str) -> None:
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image).stdout
    assert "start.py" in history
    assert not re.findall(r"(?i)://|PIP_|index.url|password|secret|token=", history)
    names = {variable.partition("=")[0] for variable in inspect(image)["Config"]["Env"]}
    assert not [name for name in names if re.search(r"PASSWORD|SECRET|TOKEN|KEY$|PIP_", name)]


def test_runs_as_a_user_without_rights_and_holds_no_compiler_pip_or_cache(image: str) -> None:
    looked = docker(
        "run", "--rm", "--network=none", "--entrypoint=sh", image, "-c", "id -u; command -v gcc nvcc pip pip3"
    )
    assert looked.stdout.split() == ["10001"]
    find = "find / -xdev -type f -path '*/.cache/*' -o -type f -path '/tmp/*' -o -type f -path '/build/*'"
    left = docker("run", "--rm", "--network=none", "--user=0", "--entrypoint=sh", image, "-c", find)
    assert (left.returncode, left.stdout) == (0, "")


def test_labels_say_what_is_installed(image: str) -> None:
    labels = inspect(image)["Config"]["Labels"]
    packages = [name for name in ("sglang", "torch", "transformers", "rq") if f"dflash-stack.{name}" in labels]
    program = f"from importlib.metadata import version; print(*[version(name) for name in {packages}])"
    printed = docker("run", "--rm", "--network=none", "--entrypoint=python", image, "-c", program).stdout
    assert printed.split() == [labels[f"dflash-stack.{name}"] for name in packages] != []
    assert labels["dflash-stack.variant"] == "cpu"


def test_container_whose_packages_were_changed_does_not_start(image: str) -> None:
    package = "sglang" if "sglang" in image else "rq"
    tampered = f"{image}-tampered"
    dockerfile = f"""
FROM {image}
USER root
RUN sed -i 's/^Version: .*/Version: 0.0.1/' /opt/environment/lib/python3.11/site-packages/{package}-*.dist-info/METADATA
USER 10001:10001
"""
    built = docker("build", "--tag", tampered, "-", standard_input=dockerfile)
    assert built.returncode == 0, built.stderr
    try:
        started = docker("run", "--rm", "--network=none", tampered, "--help")
    finally:
        docker("image", "rm", tampered)
    assert started.returncode == 1
    wrong, refused = started.stderr.splitlines()
    assert re.fullmatch(rf"\w+/cpu: {package}: must be [\d.]+, is 0\.0\.1", wrong)
    assert refused.startswith("not started: this is not what the image was built with")
