"""Which image a role runs, which one is wanted in its place, and whether that one is what it says."""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from services.errors import UserError
from services.stack.operate.engine import Image, attempt, docker, image_tags, inspect_image, last_line
from services.stack.operate.env_file import read_variables
from services.stack.operate.inside import script
from services.stack.operate.project import Project, Role, alive
from services.stack.operate.releases import Release

LABELS = "dflash-stack"
OTHERS = "build it from this checkout's lock, or give --accept-versions for another's"
NOT_PACKAGES = {"python", "cuda", "absent"}


def in_use(project: Project, role: Role) -> Image:
    """The image that a role's containers run; where none is up, the one that .env names.

    Raises:
        UserError: there is none, or the containers run different ones.
    """
    running = {container.image for container in alive(project, project.of_role(role)) if not container.one_off}
    if len(running) > 1:
        raise UserError(f"containers of {role} run {len(running)} different images; `make up` makes them one")
    name = running.pop() if running else project.image(role)
    if (image := inspect_image(name)) is None:
        raise UserError(_missing(role, name))
    return image


def wanted_image(project: Project, role: Role, wanted: str) -> tuple[Image, str]:
    """The image that a variant, a tag or a whole name stands for, and its name.

    Raises:
        UserError: this engine has none of that name, or it is another role's.
    """
    repository = f"dflash-stack/{role}"
    if ":" in wanted or "/" in wanted:
        name = wanted
    elif wanted in _versions(project).get(role, {}):
        name = f"{repository}:{wanted}-{_version(project)}"
    else:
        name = f"{repository}:{wanted}"
    if (image := inspect_image(name)) is None:
        raise UserError(_missing(role, name))
    check_role(image, name, role)
    return image, name


def check_role(image: Image, name: str, role: Role) -> None:
    """Raises UserError when an image is not of a role, by its label."""
    if image.role != role:
        raise UserError(f"image {name} is one of {image.role or 'another project'}, not of {role}")


def check_versions(project: Project, image: Image, name: str, role: Role) -> None:
    """Raises UserError when an image's labels, or what it holds, are other than images/versions.toml says."""
    expected = _versions(project).get(role, {}).get(image.variant or "", {})
    for package, version in expected.items():
        if (label := image.labels.get(f"{LABELS}.{package}", version)) != version:
            raise UserError(f"image {name}: label {package} is {label}, and must be {version}; {OTHERS}")
    mounted = ("--volume", f"{(project.folder / 'images').absolute()}:/images:ro")
    finished = attempt(
        *("run", "--rm", "--network", "none", *mounted, "--entrypoint", "python", image.id),
        *("/images/check_versions.py", role, image.variant or ""),
    )
    if finished.returncode != 0:
        lines = "; ".join(line for line in finished.stderr.splitlines() if line.strip())
        raise UserError(f"image {name}: {lines}; {OTHERS}")


def describe(project: Project, image: Image, reference: str, role: Role) -> Release:
    """The image with the versions of what it holds, as Python in it says."""
    tables = _versions(project).get(role, {}).values()
    packages = sorted({name for table in tables for name in table} - NOT_PACKAGES)
    output = docker(
        *("run", "--rm", "--network", "none", "--entrypoint", "python", image.id),
        *("-c", script("contents"), *packages),
    )
    return Release(image.id, reference, image.variant, json.loads(last_line(output)))


def variants(names: Iterable[str]) -> set[str]:
    """The variants of images: as they say themselves, and of one that is not here as its tag says."""
    found = {name: inspect_image(name) for name in names}
    return {(image.variant if image else None) or name.rpartition(":")[2] for name, image in found.items()}


def pin(image: str, role: Role) -> str:
    """Give an image a name that stays its own, so that neither a build nor a prune takes it, and return it."""
    name = f"dflash-stack/{role}:release-{image.removeprefix('sha256:')[:12]}"
    docker("tag", image, name)
    return name


def differences(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> list[str]:
    """What changes from one image's contents to another's."""
    return [
        f"{name} {before.get(name) or 'none'} -> {after.get(name) or 'none'}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _missing(role: Role, name: str) -> str:
    tags = image_tags(f"dflash-stack/{role}")
    there = f"there are {', '.join(tags)}" if tags else f"there is none of {role}"
    return f"image {name} is not here ({there}); build it with `make build`, or load it with `docker load`"


def _version(project: Project) -> str:
    """VERSION as Compose sees it: the shell's before .env's."""
    return os.environ.get("VERSION") or read_variables(project.env_file).get("VERSION") or "dev"


def _versions(project: Project) -> dict[str, dict[str, Any]]:
    path = project.folder / "images" / "versions.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the checkout's folder with --folder") from error
