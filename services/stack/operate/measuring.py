"""Measuring an image: recording it, and comparing it with the one in use."""

from pathlib import Path

from rich.console import Console

from services.errors import UserError
from services.stack.operate import images, releases
from services.stack.operate.budget import Budget, describe_budget, measure, over
from services.stack.operate.engine import inspect_image
from services.stack.operate.project import Project, Role, cards_taken
from services.stack.operate.releases import Entry, Release


def measure_image(project: Project, role: Role, wanted: str | None, model: Path | None) -> tuple[Budget, Release]:
    """Measure an image (by default the one in use) and record it.

    Raises:
        UserError: there is no such image, or the cards are in use.
    """
    image, name = images.wanted_image(project, role, wanted) if wanted else (images.in_use(project, role), "")
    release = images.describe(project, image, name or project.image(role), role)
    _check_cards_are_free(project, role)
    return measure_and_record(project, role, release, model), release


def check_image(project: Project, role: Role, wanted: str | None, margin: int, console: Console) -> None:
    """Measure an image (by default the one that .env names) against what is recorded for the one in use.

    Raises:
        UserError: it holds over `margin` bytes more at some stage, or nothing is recorded.
    """
    current = images.in_use(project, role)
    recorded = releases.measured(releases.read_entries(project.releases), current.id)
    if recorded is None:
        raise UserError(f"{role}: nothing is recorded for the image in use; first `dflash-stack budget measure {role}`")
    name = project.image(role)
    candidate = inspect_image(name)
    if wanted:
        candidate, name = images.wanted_image(project, role, wanted)
    if candidate is None:
        raise UserError(f"image {name} is not here; `make build` builds it")
    console.print(f"recorded for {current.short}: {describe_budget(recorded)}")
    release = images.describe(project, candidate, name, role)
    _check_cards_are_free(project, role)
    found = measure(release, role, project.takes_cards(role))
    console.print(f"measured {name} ({candidate.short}): {describe_budget(found)}")
    if more := over(recorded, found, margin):
        raise UserError(f"{name} holds more memory than recorded: {'; '.join(more)} (margin {margin / 1e6:,.0f} MB)")


def measure_and_record(project: Project, role: Role, release: Release, model: Path | None = None) -> Budget:
    """Measure an image and record that for its id."""
    budget = measure(release, role, project.takes_cards(role), model)
    releases.append(project.releases, Entry(releases.now(), "measured", "measure", role, release, budget=budget))
    return budget


def _check_cards_are_free(project: Project, role: Role) -> None:
    if project.takes_cards(role) and cards_taken(project):
        raise UserError(
            "the cards are in use, and measuring would take memory from them; first `dflash-stack phase idle`"
        )
