"""A copy of all runs, with .env and releases.jsonl; and putting it back.

Redis is not in it: the queues are made anew from the runs' files. Nor are the secrets, which belong to a machine.
"""

import hashlib
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from rich.console import Console

from services.errors import UserError
from services.files import publish_folder, read_json, replace_json
from services.stack.operate.engine import docker, last_line
from services.stack.operate.project import ROLES, Project, alive, command, compose

ARCHIVE = "runs.tar"
MANIFEST = "manifest.json"
ENV, RELEASES = ".env", "releases.jsonl"
# Each result is listed before what it was made from: whatever is published while this goes on, no sample is in the copy
# without its completion. The hub's cache and half-written files are left out.
LIST_FILES = """
cd /runs
for part in export evaluation train dataset samples journal completions held_out prompts; do
  for folder in ./*/"$part"; do [ -e "$folder" ] && find "$folder" ! -name '.*.tmp' -print0; done
done
find . -mindepth 1 -maxdepth 2 -not -path './.huggingface*' ! -name '.*.tmp' -print0
true
"""
# tar's status 1: a file changed or went away while it read, which published files never do. Taken for 0 in there, since
# 1 is also how Compose ends when the engine has gone away.
CREATE = (
    f"({LIST_FILES}) | tar --create --directory=/runs --no-recursion --null --verbatim-files-from --files-from=-"
    " || [ $? -eq 1 ]"
)
EXTRACT = "tar --extract --directory=/runs"
EMPTY = "find /runs -mindepth 1 -delete"
# Bytes that are free in the volume, and bytes that its runs take.
ROOM = "df --output=avail --block-size=1 /runs | tail --lines=1; du --summarize --block-size=1 /runs | cut --fields=1"


def back_up(project: Project, to: Path, console: Console) -> Path:
    """Copy all runs into a new folder under `to`, named after the time; nothing has to be stopped for it.

    Raises:
        UserError: there is no room for it, or the volume cannot be read.
    """
    needed = int(_in_operator(project, "du --summarize --block-size=1 --exclude=.huggingface /runs").split()[0])
    to.mkdir(parents=True, exist_ok=True)
    if needed > (free := shutil.disk_usage(to).free):
        raise UserError(
            f"{to}: the runs are {needed / 1e9:,.1f} GB and {free / 1e9:,.1f} GB are free; name another --to"
        )
    folder = to / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")

    def fill(new: Path) -> None:
        with (new / ARCHIVE).open("wb") as archive:
            _stream(project, CREATE, output=archive)
        for source, name in ((project.env_file, ENV), (project.releases, RELEASES)):
            if source.is_file():
                shutil.copy2(source, new / name)
        size = (new / ARCHIVE).stat().st_size
        replace_json(new / MANIFEST, {"project": project.name, "bytes": size, "sha256": _digest(new / ARCHIVE)})

    publish_folder(folder, fill)
    console.print(f"{folder}: {(folder / ARCHIVE).stat().st_size / 1e6:,.1f} MB")
    return folder


def restore(project: Project, folder: Path, replace: bool, console: Console) -> None:
    """Put a copy's runs in place, and their queues; releases.jsonl only where there is none.

    Raises:
        UserError: the copy is damaged, the stack is up, there are runs and `replace` is not given, or the volume has
            no room for the copy's. Nothing was removed.
    """
    archive, manifest = folder / ARCHIVE, folder / MANIFEST
    if not manifest.is_file():
        raise UserError(f"{folder} is no backup: {MANIFEST} is missing")
    if _digest(archive) != read_json(manifest)["sha256"]:
        raise UserError(f"{archive}: it is not what was written (sha256 differs); take another backup")
    workers = [name for role in ROLES for name in project.of_role(role)]
    if up := alive(project, workers):
        raise UserError(f"{up[0].name} is up; take the stack down first: make down")
    there = _in_operator(project, "find /runs -mindepth 2 -maxdepth 2 -name run.json").split()
    if there and not replace:
        names = ", ".join(Path(path).parent.name for path in there)
        raise UserError(f"there are runs: {names}; --replace removes them first")
    needed, free = archive.stat().st_size, sum(int(part) for part in _in_operator(project, ROOM).split())
    if needed > free:
        sizes = f"its runs are {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free in the volume"
        raise UserError(f"{folder}: {sizes}; make room on the engine's disk")
    compose(project, "down")
    _in_operator(project, EMPTY)
    with archive.open("rb") as content:
        _stream(project, EXTRACT, source=content)
    if (folder / RELEASES).is_file() and not project.releases.exists():
        shutil.copy2(folder / RELEASES, project.releases)
    _make_queues_anew(project, console)


def _make_queues_anew(project: Project, console: Console) -> None:
    if docker("volume", "ls", "--quiet", "--filter", f"name=^{project.name}_redis$").strip():
        docker("volume", "rm", f"{project.name}_redis")
    submitted = _in_operator(project, "find /runs -mindepth 2 -maxdepth 2 -name control.json").split()
    compose(project, "up", "--detach", "--wait", "--no-build", "redis")
    for path in submitted:
        name = Path(path).parent.name
        console.print(last_line(compose(project, "run", "--rm", "--no-TTY", "operator", "reconcile", name)))
    console.print("restored; `make up` starts the workers. A stage that was waiting: give its command again")


def _in_operator(project: Project, script: str) -> str:
    return compose(project, *_shell(script))


def _shell(script: str) -> tuple[str, ...]:
    return ("run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", "bash", "operator", "-o", "pipefail", "-c", script)


def _stream(project: Project, script: str, source: IO[bytes] | None = None, output: IO[bytes] | None = None) -> None:
    finished = subprocess.run(
        ["docker", *command(project), *_shell(script)],
        cwd=project.folder,
        stdin=source or subprocess.DEVNULL,
        stdout=output or subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if finished.returncode != 0:
        doing = "reading the runs" if output else "writing the runs"
        raise UserError(f"{doing} failed: {last_line(finished.stderr.decode(errors='replace'))}")


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; it is part of every backup") from error
