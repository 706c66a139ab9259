"""The commands that operate the stack on its host."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.errors import UserError
from services.stack.operate.project import ROLES, Project, Role, open_project

PANEL = "Operating the stack, on its host"

Folder = Annotated[Path, typer.Option(help="the checkout that holds compose.yaml")]
EnvFile = Annotated[Path, typer.Option(help="its .env; operations/ lies beside it")]
Service = Annotated[str, typer.Argument(metavar="SERVICE", help=f"one of {', '.join(ROLES)}")]
Margin = Annotated[float, typer.Option(min=0, help="MB that an image may hold more than the one in use")]
Why = Annotated[str, typer.Option(help="kept in releases.jsonl")]
HERE, ENV = Path(), Path(".env")
MARGIN = 100.0
budget_app = typer.Typer(
    no_args_is_help=True, help="What an idle process of an image holds, on each card or on the host."
)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (doctor, phase, scale, swap, rollback, history, backup, restore, secrets, upgrade):
        app.command(rich_help_panel=PANEL)(command)
    app.add_typer(budget_app, name="budget", rich_help_panel=PANEL)


def doctor(folder: Folder = HERE, env_file: EnvFile = ENV) -> None:
    """Whether this host can run the stack: a line for each check, and what to do about what is wrong."""
    from services.stack.operate.doctor import examine

    console, wrong = _console(), []
    for check in examine(folder, env_file):
        console.print(str(check), markup=False, soft_wrap=True)
        if check.state == "wrong":
            wrong.append(check)
    if wrong:
        raise UserError(f"{len(wrong)} of the checks above are wrong; begin with {wrong[0].name}: {wrong[0].remedy}")


def phase(
    wanted: Annotated[str, typer.Argument(metavar="generate|train|idle", help="whom the cards are for")],
    folder: Folder = HERE,
    env_file: EnvFile = ENV,
) -> None:
    """Hand the cards over: stop the other side, see that every card is free, start, wait until all is healthy."""
    from services.stack.operate.phase import PHASES, go_to_phase

    if wanted not in PHASES:
        raise UserError(f"there is no phase {wanted!r}; phases are {', '.join(PHASES)}")
    go_to_phase(open_project(folder, env_file), wanted, _console())


def scale(
    producers: Annotated[int, typer.Argument(min=0, help="how many producers, from now on")],
    folder: Folder = HERE,
    env_file: EnvFile = ENV,
) -> None:
    """Run so many producers: more take jobs at once, fewer finish the answers in flight first."""
    from services.stack.operate.env_file import set_variable
    from services.stack.operate.project import alive, start

    with _operated(folder, env_file) as project:
        set_variable(env_file, "PRODUCERS", str(producers))
        if alive(project, ["producer"]):
            start(project, {"producer": producers}, alone=True, kept=True)
    _console().print(f"{producers} producers")


def swap(
    service: Service,
    wanted: Annotated[str, typer.Argument(metavar="VARIANT|TAG", help="such as cu128, cpu-1.2 or a whole name")],
    margin: Margin = MARGIN,
    accept_versions: Annotated[bool, typer.Option(help="take it though versions.toml says otherwise")] = False,
    why: Why = "",
    folder: Folder = HERE,
    env_file: EnvFile = ENV,
) -> None:
    """Put another image in a service's place, and go back by itself if it does not work."""
    from services.stack.operate import swap as swapping

    limits = swapping.Limits(round(margin * 1e6), accept_versions)
    swapping.swap(open_project(folder, env_file), _role(service), wanted, limits, why, _console())


def rollback(service: Service, why: Why = "", folder: Folder = HERE, env_file: EnvFile = ENV) -> None:
    """Put back the image that a service ran before its last swap."""
    from services.stack.operate import swap as swapping

    swapping.rollback(open_project(folder, env_file), _role(service), why, _console())


def history(env_file: EnvFile = ENV) -> None:
    """Every change of an image: when, from what to what, and why."""
    from services.stack.operate.history import history_table
    from services.stack.operate.project import releases_file
    from services.stack.operate.releases import read_entries

    entries = read_entries(releases_file(env_file))
    changed = any(entry.event != "measured" for entry in entries)
    _console().print(history_table(entries) if changed else "no image was changed yet")


@budget_app.command("measure")
def budget_measure(
    service: Service,
    image: Annotated[str | None, typer.Argument(metavar="[VARIANT|TAG]", help="default: the one in use")] = None,
    model: Annotated[Path | None, typer.Option(help="a model's folder: measure with its weights loaded too")] = None,
    folder: Folder = HERE,
    env_file: EnvFile = ENV,
) -> None:
    """Measure an image and record it for its id."""
    from services.stack.operate.budget import describe_budget
    from services.stack.operate.measuring import measure_image

    with _operated(folder, env_file) as project:
        found, release = measure_image(project, _role(service), image, model)
    _console().print(f"{release.reference} ({release.short}): {describe_budget(found)}")


@budget_app.command("check")
def budget_check(
    service: Service,
    image: Annotated[str | None, typer.Argument(metavar="[VARIANT|TAG]", help="default: the one .env names")] = None,
    margin: Margin = MARGIN,
    folder: Folder = HERE,
    env_file: EnvFile = ENV,
) -> None:
    """Measure an image, and compare with what is recorded for the one in use; exit 1 when it holds too much more."""
    from services.stack.operate.measuring import check_image

    with _operated(folder, env_file) as project:
        check_image(project, _role(service), image, round(margin * 1e6), _console())


def backup(
    to: Annotated[Path, typer.Option(help="folder of backups; a new one is made in it")] = Path("var/backups"),
    folder: Folder = HERE,
    env_file: EnvFile = ENV,
) -> None:
    """Copy all runs, .env and releases.jsonl; nothing has to be stopped for it."""
    from services.stack.operate.backup import back_up

    back_up(open_project(folder, env_file), to, _console())


def restore(
    saved: Annotated[Path, typer.Argument(metavar="BACKUP", help="folder that `backup` made")],
    replace: Annotated[bool, typer.Option("--replace", help="remove the runs that there are")] = False,
    folder: Folder = HERE,
    env_file: EnvFile = ENV,
) -> None:
    """Put a backup's runs in place of an empty volume, and enqueue what they lack."""
    from services.stack.operate.backup import restore as restore_runs

    with _operated(folder, env_file) as project:
        restore_runs(project, saved, replace, _console())


def secrets(
    folder: Annotated[Path, typer.Option(help="folder to make, SECRETS_DIR in .env")] = Path("secrets"),
) -> None:
    """Make the secrets that are missing: random passwords for Redis and Grafana, an empty token of the hub."""
    from services.stack.operate.secret_folder import make_secrets

    made = make_secrets(folder)
    _console().print(f"{folder}: made {', '.join(made)}" if made else f"{folder}: all there")


def upgrade(
    to: Annotated[
        str | None, typer.Argument(metavar="[VERSION]", help="tag, branch or commit; default: newest version")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="change nothing; tell what would change")] = False,
    folder: Folder = HERE,
    env_file: EnvFile = ENV,
) -> None:
    """Take this checkout to another version; .env stays, and what changed is told."""
    from services.stack.operate.upgrade import upgrade as upgrade_checkout

    upgrade_checkout(folder, env_file, to, dry_run, _console())


@contextmanager
def _operated(folder: Path, env_file: Path) -> Iterator[Project]:
    """The project, with every other command that changes it kept out."""
    from services.stack.operate.releases import operating

    project = open_project(folder, env_file)
    with operating(project.releases):
        yield project


def _role(service: str) -> Role:
    for role in ROLES:
        if service == role or (role == "sglang" and service.startswith("sglang-")):
            return role
    raise UserError(f"service {service!r} has no image of this project; those that have are {', '.join(ROLES)}")


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
