"""Putting another image in a role's place, and going back: checked, recorded, and undone by itself when it fails."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rich.console import Console

from services.errors import UserError
from services.stack.operate import images, releases
from services.stack.operate.budget import Budget, describe_budget, over
from services.stack.operate.engine import Image, inspect_image
from services.stack.operate.env_file import read_variables, set_variable
from services.stack.operate.gpus import driver_version, older_than_needed
from services.stack.operate.measuring import measure_and_record
from services.stack.operate.project import (
    ROLES,
    SIDES,
    Project,
    Role,
    alive,
    cards_taken,
    open_project,
    scales,
    start,
    stop,
)
from services.stack.operate.releases import Action, Entry, Release
from services.stack.operate.smoke import smoke_before_start, smoke_serving


@dataclass(frozen=True)
class Limits:
    """What a candidate may differ in: bytes that it holds more than the image in use, and its versions."""

    margin: int
    any_versions: bool = False


def swap(project: Project, role: Role, wanted: str, limits: Limits, why: str, console: Console) -> None:
    """Put the image that `wanted` names (a variant, a tag or a whole name) in a role's place.

    Raises:
        UserError: it is not there, not what versions.toml says, holds more memory, or does not work. What was in its
            place is there again.
    """
    with releases.operating(project.releases):
        project = settle(project, console)
        candidate, name = images.wanted_image(project, role, wanted)
        current = images.in_use(project, role)
        if candidate.id == current.id:
            console.print(f"{role}: {name} is in use already ({candidate.short})")
            return
        if not limits.any_versions:
            images.check_versions(project, candidate, name, role)
        _change(project, "swap", role, (current, project.image(role)), (candidate, name), limits, why, console)


def rollback(project: Project, role: Role, why: str, console: Console) -> None:
    """Put the image back that was in a role's place before the one in use.

    Raises:
        UserError: there is none, or it is gone or does not work any more.
    """
    with releases.operating(project.releases):
        project = settle(project, console)
        back = releases.earlier(releases.read_entries(project.releases), role)
        if back is None:
            raise UserError(f"{role}: releases.jsonl has no swap to go back from")
        image = inspect_image(back.image)
        if image is None:
            raise UserError(
                f"{role}: image {back.reference} ({back.short}) is gone; build that version, then swap to it"
            )
        current = images.in_use(project, role)
        _change(project, "rollback", role, (current, project.image(role)), (image, back.reference), None, why, console)


def settle(project: Project, console: Console) -> Project:
    """Finish or undo a change that was interrupted; returns the project as it is then.

    It is finished when its services run the new image, are healthy and pass its smoke check, and else undone.
    """
    entry = releases.interrupted(releases.read_entries(project.releases))
    if entry is None:
        return project
    role = _role(entry.role)
    if _arrived(project, entry, role, console):
        _record_done(project, replace(entry, why=f"{entry.why}; found finished after an interruption"))
        console.print(f"{role}: an interrupted {entry.action} to {entry.to.reference} had arrived")
        return project
    console.print(f"{role}: an interrupted {entry.action} to {entry.to.reference} is undone")
    return _undo(project, entry, "it was interrupted")


def _arrived(project: Project, entry: Entry, role: Role, console: Console) -> bool:
    running = alive(project, list(entry.scales))
    configured = inspect_image(project.image(role))
    # Where nothing was up, nothing has shown that the image works.
    if not running or configured is None or configured.id != entry.to.image or scales(running) != dict(entry.scales):
        return False
    if any(one.health != "healthy" or one.image != entry.to.image for one in running):
        return False
    try:
        _told(smoke_serving(project, role), console)
    except UserError as error:
        console.print(f"  {error}", markup=False)
        return False
    return True


def _budget_of(project: Project, release: Release, role: Role) -> Budget:
    """What is recorded for an image id, measured and recorded now if nothing is."""
    recorded = releases.measured(releases.read_entries(project.releases), release.image)
    return measure_and_record(project, role, release) if recorded is None else recorded


def _change(
    project: Project,
    action: Action,
    role: Role,
    current: tuple[Image, str],
    candidate: tuple[Image, str],
    limits: Limits | None,
    why: str,
    console: Console,
) -> None:
    _check_cards_are_ours(project, role)
    _check_driver(project, *candidate)
    before = images.describe(project, *current, role)
    after = images.describe(project, *candidate, role)
    changes = images.differences(before.contents, after.contents)
    console.print(f"{role}: {before.reference} ({before.short}) -> {after.reference} ({after.short})")
    console.print(f"  {', '.join(changes) or 'the same versions'}")
    # On a card, a process for measuring must not stand beside one that trains or serves.
    early = not (project.takes_cards(role) and cards_taken(project))
    if limits and early:
        _check_budget(project, role, before, after, limits, console)
    up = scales(alive(project, project.of_role(role)))
    setting = read_variables(project.env_file).get(_variable(role))
    entry = Entry(releases.now(), "begun", action, role, after, before, up, setting, why=why)
    for image in (current[0], candidate[0]):
        images.pin(image.id, role)
    _record(project, entry)
    try:
        _stop(project, up, console)
        if limits and not early:
            _check_budget(project, role, before, after, limits, console)
        project = _set_image(project, role, images.pin(candidate[0].id, role))
        _told(smoke_before_start(project, role), console)
        start(project, up, alone=True)
        _told(smoke_serving(project, role), console)
    except (UserError, OSError, KeyboardInterrupt) as error:
        reason = str(error) or "interrupted"
        console.print(f"  {reason}; going back to {before.reference}", markup=False)
        try:
            _undo(project, entry, reason)
        except UserError as failed:
            raise UserError(f"{role}: {reason}; going back to {before.reference} failed too: {failed}") from error
        raise UserError(f"{role}: {reason}; {before.reference} ({before.short}) is in its place again") from error
    _record_done(project, entry)
    state = f"{', '.join(up)} healthy" if up else "none of its services was up, none is started"
    console.print(f"{role}: {after.reference} is in use; {state}")


def _check_budget(
    project: Project, role: Role, current: Release, candidate: Release, limits: Limits, console: Console
) -> None:
    before, after = (_budget_of(project, one, role) for one in (current, candidate))
    console.print(f"  holds, idle: {describe_budget(after)}")
    if more := over(before, after, limits.margin):
        raise UserError(
            f"{candidate.reference} holds more memory than the image in use: {'; '.join(more)} "
            f"(margin {limits.margin / 1e6:,.0f} MB); give a larger --margin to take it all the same"
        )


def _check_cards_are_ours(project: Project, role: Role) -> None:
    ours = project.of_role(role)
    others = [name for side in SIDES for name in project.of_side(side) if not set(ours) & set(project.of_side(side))]
    if project.takes_cards(role) and (holding := alive(project, others)):
        raise UserError(f"{role}: the cards are in use by {holding[0].name}; first `dflash-stack phase idle`")


def _check_driver(project: Project, image: Image, name: str) -> None:
    if not project.uses_gpus:
        return
    driver = driver_version()
    if needed := older_than_needed(driver, [image.variant or ""]):
        raise UserError(f"driver {driver} is too old for {name}, whose CUDA needs {needed}; install driver {needed}")


def _undo(project: Project, entry: Entry, reason: str) -> Project:
    """Put back what was there when a change began: .env, and the services that were up.

    It is recorded as undone once .env is as it was, also when the old image does not start any more. One that is
    interrupted before that is left to the next command.
    """
    role = _role(entry.role)
    if entry.before is None:
        raise ValueError("a change without what was before it")
    stop(project, list(entry.scales))
    project = _set_image(project, role, entry.setting)
    undone = replace(entry, event="undone", why=f"{entry.why}; {reason}")
    try:
        configured = inspect_image(project.image(role))
        if configured is None or configured.id != entry.before.image:
            # Its name stands for another image by now.
            project = _set_image(project, role, images.pin(entry.before.image, role))
        start(project, entry.scales, alone=True)
    except UserError as error:
        _record(project, replace(undone, why=f"{undone.why}; {error}"))
        raise
    _record(project, undone)
    return project


def _set_image(project: Project, role: Role, name: str | None) -> Project:
    set_variable(project.env_file, _variable(role), name)
    if role == "sglang" and project.uses_gpus:
        set_kernels_key(project)
    return open_project(project.folder, project.env_file)


def set_kernels_key(project: Project) -> None:
    """Name the volume of compiled kernels after the server's image and the driver: neither fits another's."""
    project = open_project(project.folder, project.env_file)
    if (image := inspect_image(project.image("sglang"))) is not None:
        set_variable(project.env_file, "KERNELS_KEY", f"{image.short}-{driver_version()}")


def _stop(project: Project, up: Mapping[str, int], console: Console) -> None:
    for container in stop(project, list(up)):
        console.print(f"  {container.name} did not end within its grace and was killed")


def _record(project: Project, entry: Entry) -> None:
    releases.append(project.releases, replace(entry, when=releases.now()))


def _record_done(project: Project, entry: Entry) -> None:
    budget = releases.measured(releases.read_entries(project.releases), entry.to.image)
    _record(project, replace(entry, event="done", budget=budget))


def _told(said: str, console: Console) -> None:
    if said:
        console.print(f"  {said}", markup=False)


def _variable(role: Role) -> str:
    return f"{role.upper()}_IMAGE"


def _role(name: str) -> Role:
    for role in ROLES:
        if role == name:
            return role
    raise UserError(f"releases.jsonl names a role {name!r}; there are {', '.join(ROLES)}")
