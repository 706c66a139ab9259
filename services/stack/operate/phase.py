"""Handing the cards over: one side is stopped, the cards are seen to be free, and only then the other one starts.

Where there are no cards, a side is free when none of its containers holds a process any more.
"""

import time
from typing import Literal

from rich.console import Console

from services.errors import UserError
from services.stack.operate import images, releases
from services.stack.operate.engine import Container, inspect_image, processes
from services.stack.operate.env_file import read_variables, set_variable
from services.stack.operate.gpus import Card, missing_cards, not_free, older_than_needed, read_cards, read_holders
from services.stack.operate.project import SIDES, Project, alive, open_project, scales, start, stop
from services.stack.operate.swap import set_kernels_key, settle

Phase = Literal["generate", "train", "idle"]
PHASES: tuple[Phase, ...] = ("generate", "train", "idle")
# A driver gives a process's memory back a moment after it has ended.
SETTLED_SECONDS = 30.0


def go_to_phase(project: Project, wanted: Phase, console: Console) -> None:
    """Give the cards to generating, to training, or to nobody.

    Raises:
        UserError: somebody else holds a card, an image or a card is not there, or the new side does not get healthy.
            What was up before is up again.
    """
    with releases.operating(project.releases):
        project = settle(project, console)
        leaving = [name for side in SIDES if side != wanted for name in project.of_side(side)]
        entering = [] if wanted == "idle" else project.of_side(wanted)
        _check_images(project, entering)
        _check_mounts(project, entering)
        _check_cards(project, entering)
        ours = [one for one in alive(project, leaving + entering) if not one.one_off]
        if others := holding(project, leaving, ours):
            raise UserError(f"phase {wanted}: {'; '.join(others)}; end it first. Nothing was changed")
        before = scales(ours)
        profiles = read_variables(project.env_file).get("COMPOSE_PROFILES")
        try:
            for container in stop(project, leaving):
                console.print(f"{container.name} did not end within its grace and was killed")
            _wait_until_free(project, leaving, [one for one in ours if one.service in entering])
            project = _remember(project, wanted)
            start(project, _counts(project, entering))
        except (UserError, OSError, KeyboardInterrupt) as error:
            set_variable(project.env_file, "COMPOSE_PROFILES", profiles)
            raise UserError(
                f"phase {wanted}: {error or 'interrupted'}; {_go_back(project, entering, before)}"
            ) from error
        left = [name for name in before if name in leaving]
        stopped = f"stopped {', '.join(left)}; " if left else ""
        console.print(f"phase {wanted}: {stopped}{', '.join(entering) + ' healthy' if entering else 'nothing runs'}")


def holding(project: Project, services: list[str], allowed: list[Container]) -> list[str]:
    """A line for whoever holds what the phases share and is none of the `allowed`.

    With cards, by NVML: any process on any of them. Without, the containers of `services`.
    """
    names = {container.name for container in allowed}
    if project.uses_gpus:
        cards = read_cards()
        holders = read_holders(cards)
        held = {holder.card for holder in holders}
        free = [card for card in cards if card.index not in held]
        return not_free(free, [holder for holder in holders if holder.container not in names])
    return [_describe(one) for one in alive(project, services) if one.name not in names]


def _describe(container: Container) -> str:
    found = processes(container)
    pid = found[0].pid if found else container.pid
    command = f" ({found[0].command[:80]})" if found else ""
    size = sum(process.resident for process in found) / 2**20
    return f"pid {pid}{command}, container {container.name} ({container.state}), holds {size:,.0f} MiB"


def _wait_until_free(project: Project, leaving: list[str], allowed: list[Container]) -> None:
    deadline = time.monotonic() + SETTLED_SECONDS
    while left := holding(project, leaving, allowed):
        if time.monotonic() > deadline:
            raise UserError(f"{'; '.join(left)} after all of it was stopped; end it, then give the command again")
        time.sleep(1)


def _check_images(project: Project, services: list[str]) -> None:
    for name in sorted({str(project.services[service]["image"]) for service in services}):
        if inspect_image(name) is None:
            raise UserError(f"image {name} is not here; `make build` builds it, `docker load` loads it")


def _check_mounts(project: Project, services: list[str]) -> None:
    for service in services:
        for path in project.mounted(service):
            if not path.exists():
                raise UserError(f"{path} is not there, and {service} needs it; `dflash-stack doctor` tells what to do")


def _check_cards(project: Project, services: list[str]) -> None:
    wanted = {card for service in services for card in project.cards(service) or []}
    if not project.uses_gpus or not services:
        return
    cards = _cards_or_none()
    if missing := missing_cards(wanted, cards):
        raise UserError(
            f"card {', '.join(missing)} is not in this machine, which has {len(cards)}; "
            f"`dflash-stack render --gpus {len(cards)} --output compose.yaml` writes the stack for those"
        )
    names = (str(project.services[service]["image"]) for service in services if project.cards(service) != [])
    if needed := older_than_needed(cards[0].driver, images.variants(names)):
        raise UserError(
            f"driver {cards[0].driver} is too old: the images' CUDA needs {needed}; install driver {needed}"
        )


def _cards_or_none() -> list[Card]:
    cards = read_cards()
    if not cards:
        raise UserError("nvidia-smi finds no card; with no GPU set COMPOSE_FILE=compose.cpu.yaml in .env")
    return cards


def _counts(project: Project, services: list[str]) -> dict[str, int]:
    return {name: int(project.services[name].get("deploy", {}).get("replicas", 1)) for name in services}


def _remember(project: Project, wanted: Phase) -> Project:
    """Make .env bring this phase up from now on, and look at the configuration anew."""
    kept = [
        profile
        for profile in read_variables(project.env_file).get("COMPOSE_PROFILES", "").split(",")
        if profile and profile not in SIDES
    ]
    set_variable(project.env_file, "COMPOSE_PROFILES", ",".join([*kept, *([] if wanted == "idle" else [wanted])]))
    if wanted == "generate" and project.uses_gpus:
        set_kernels_key(project)
    return open_project(project.folder, project.env_file)


def _go_back(project: Project, entering: list[str], before: dict[str, int]) -> str:
    try:
        stop(project, [name for name in entering if name not in before])
        start(project, before, kept=True)
    except UserError as error:
        return f"going back failed too: {error}"
    return f"{', '.join(before)} up again" if before else "nothing runs, as before"
