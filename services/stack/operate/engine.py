"""Docker's command line as functions: what it prints as data, and why it failed as one line.

The command line and not a library: Compose has no other interface, and so both use the same host, context and
credentials that the user has chosen.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.errors import UserError

ROLE_LABEL = "dflash-stack.image"
VARIANT_LABEL = "dflash-stack.variant"
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
ONE_OFF_LABEL = "com.docker.compose.oneoff"
INSTALL = "install Docker Engine with its compose plugin: https://docs.docker.com/engine/install/"


@dataclass(frozen=True)
class Image:
    """An image of this engine; `id` is what it is, and stays when a tag moves."""

    id: str
    labels: Mapping[str, str]

    @property
    def short(self) -> str:
        return self.id.removeprefix("sha256:")[:12]

    @property
    def role(self) -> str | None:
        return self.labels.get(ROLE_LABEL)

    @property
    def variant(self) -> str | None:
        return self.labels.get(VARIANT_LABEL)


@dataclass(frozen=True)
class Container:
    """A container of a Compose project; `pid` is that of its first process on the host, 0 when it has none.

    `health` is "" for one without a health check.
    """

    id: str
    name: str
    service: str
    image: str
    state: str
    health: str
    exit_code: int
    pid: int
    one_off: bool

    @property
    def alive(self) -> bool:
        return self.state in {"running", "paused", "restarting"}


@dataclass(frozen=True)
class ContainerProcess:
    """A process in a container: host pid, resident bytes, command line."""

    pid: int
    resident: int
    command: str


def attempt(*arguments: str, folder: Path | None = None, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `docker`, and return however it ended.

    Raises:
        UserError: there is no `docker` here.
    """
    try:
        return subprocess.run(
            ["docker", *arguments],
            cwd=folder,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise UserError(f"there is no command `docker`; {INSTALL}") from error


def docker(*arguments: str, folder: Path | None = None, stdin: str | None = None) -> str:
    """What `docker` printed.

    Raises:
        UserError: it failed, with its own last line.
    """
    finished = attempt(*arguments, folder=folder, stdin=stdin)
    if finished.returncode != 0:
        shown = " ".join(arguments[:2])
        raise UserError(f"docker {shown}: {last_line(finished.stderr) or f'status {finished.returncode}'}")
    return finished.stdout


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def inspect_image(reference: str) -> Image | None:
    """The image of this name or id, if this engine has it."""
    finished = attempt("image", "inspect", reference)
    if finished.returncode != 0:
        if "No such image" in finished.stderr or "no such image" in finished.stderr:
            return None
        raise UserError(f"docker image inspect: {last_line(finished.stderr)}")
    (content,) = json.loads(finished.stdout)
    return Image(content["Id"], content["Config"].get("Labels") or {})


def image_tags(repository: str) -> list[str]:
    """Tags of a repository that this engine has, newest first."""
    lines = docker("image", "ls", repository, "--format", "{{.Tag}}").splitlines()
    return [line for line in lines if line and line != "<none>"]


def containers(project: str, service: str | None = None) -> list[Container]:
    """A Compose project's containers, those of `docker compose run` included."""
    chosen = ["--filter", f"label={PROJECT_LABEL}={project}"]
    if service is not None:
        chosen += ["--filter", f"label={SERVICE_LABEL}={service}"]
    return [_container(content) for content in _inspect(docker("ps", "--all", "--quiet", *chosen).split())]


def container_named(identifier: str) -> Container | None:
    """The container with this id or name, of whatever project."""
    found = _inspect([identifier])
    return _container(found[0]) if found else None


def processes(container: Container) -> list[ContainerProcess]:
    """What runs in a container."""
    finished = attempt("top", container.id, "-eo", "pid,rss,args")
    rows = [line.split(None, 2) for line in finished.stdout.splitlines()[1:]]
    return [ContainerProcess(int(row[0]), int(row[1]) * 1024, row[2]) for row in rows if len(row) == 3]


def _inspect(identifiers: Sequence[str]) -> list[dict[str, Any]]:
    if not identifiers:
        return []
    # One that ended in between is left out of what is printed, with an error beside it.
    content: list[dict[str, Any]] = json.loads(attempt("inspect", "--type", "container", *identifiers).stdout or "[]")
    return content


def _container(content: Mapping[str, Any]) -> Container:
    labels, state = content["Config"].get("Labels") or {}, content["State"]
    return Container(
        id=content["Id"],
        name=content["Name"].lstrip("/"),
        service=labels.get(SERVICE_LABEL, ""),
        image=content["Image"],
        state=state["Status"],
        health=state.get("Health", {}).get("Status", ""),
        exit_code=state["ExitCode"],
        pid=state["Pid"],
        one_off=labels.get(ONE_OFF_LABEL) == "True",
    )
