"""Whatever interrupts a change, the next command knows of it; and going back brings up what was up."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.errors import UserError
from services.stack.operate import images, phase, releases, swap
from services.stack.operate.engine import Container, Image
from services.stack.operate.env_file import read_variables, set_variable
from services.stack.operate.project import Project, scales
from services.stack.operate.releases import Entry, Release

OLD, NEW = "sha256:old", "sha256:new"
CONSOLE = Console(quiet=True)


def service(role: str, side: str) -> dict[str, Any]:
    return {"build": {"dockerfile": f"images/{role}/Dockerfile"}, "image": "by-env", "profiles": [side]}


class Engine:
    """What is up on an engine in memory, and what interrupts it; commands see it in place of Docker."""

    def __init__(self, project: Project) -> None:
        self.up: dict[str, int] = {}
        self.image = OLD
        self.project = project
        self.stopping: Exception | KeyboardInterrupt | None = None
        self.starting: list[BaseException | None] = []

    def containers(self, _project: Project, services: list[str]) -> list[Container]:
        return [
            Container(f"{name}{n}", f"{name}-{n}", name, self.image, "running", "healthy", 0, 1, False)
            for name, count in self.up.items()
            for n in range(count)
            if name in services
        ]

    def stop(self, _project: Project, services: list[str]) -> list[Container]:
        if self.stopping is not None:
            raise self.stopping
        for name in services:
            self.up.pop(name, None)
        return []

    def start(self, _project: Project, counts: Mapping[str, int], **_how: bool) -> None:
        if self.starting and (error := self.starting.pop(0)):
            raise error
        self.image = read_variables(self.project.env_file).get("PRODUCER_IMAGE", OLD)
        self.up.update(counts)

    def configured(self, _reference: str) -> Image:
        return Image(read_variables(self.project.env_file).get("PRODUCER_IMAGE", OLD), {})


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / ".env").write_text("COMPOSE_PROFILES=generate\n")
    services = {
        "sglang": service("sglang", "generate"),
        "producer": service("producer", "generate"),
        "trainer": service("trainer", "train"),
    }
    return Project(tmp_path, tmp_path / ".env", "p", services)


@pytest.fixture
def engine(project: Project, monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(project)
    for module in (swap, phase):
        monkeypatch.setattr(module, "alive", engine.containers)
        monkeypatch.setattr(module, "stop", engine.stop)
        monkeypatch.setattr(module, "start", engine.start)
        monkeypatch.setattr(module, "inspect_image", engine.configured)
        monkeypatch.setattr(module, "open_project", lambda *_: project)
    monkeypatch.setattr(images, "pin", lambda image, _role: image)
    monkeypatch.setattr(phase, "processes", lambda _: [])
    return engine


def begun(project: Project) -> Entry:
    """A swap of two producers from OLD to NEW that was begun, with .env as it is by then."""
    entry = Entry("t", "begun", "swap", "producer", Release(NEW, NEW), Release(OLD, OLD), {"producer": 2})
    releases.append(project.releases, entry)
    set_variable(project.env_file, "PRODUCER_IMAGE", NEW)
    return entry


def last(project: Project) -> Entry:
    return releases.read_entries(project.releases)[-1]


def test_going_back_that_is_interrupted_too_is_finished_by_the_next_command(project: Project, engine: Engine) -> None:
    begun(project)
    engine.up = {"producer": 1}
    engine.stopping = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        swap.settle(project, CONSOLE)
    assert last(project).event == "begun"
    engine.stopping = None
    swap.settle(project, CONSOLE)
    assert last(project).event == "undone"
    assert (engine.up, engine.image) == ({"producer": 2}, OLD)
    assert "PRODUCER_IMAGE" not in project.env_file.read_text()


def test_an_old_image_that_does_not_start_any_more_keeps_nobody_from_swapping_on(
    project: Project, engine: Engine
) -> None:
    begun(project)
    engine.starting = [UserError("producer-1 is not healthy")]
    with pytest.raises(UserError, match="not healthy"):
        swap.settle(project, CONSOLE)
    assert (last(project).event, last(project).why) == ("undone", "; it was interrupted; producer-1 is not healthy")
    swap.settle(project, CONSOLE)


def test_a_swap_that_had_arrived_is_recorded_with_its_memory(project: Project, engine: Engine) -> None:
    entry = begun(project)
    budget = {"resident": {"import": 7}}
    releases.append(project.releases, replace(entry, event="measured", action="measure", budget=budget))
    engine.up, engine.image = {"producer": 2}, NEW
    swap.settle(project, CONSOLE)
    assert (last(project).event, last(project).budget) == ("done", budget)


def test_a_server_that_is_healthy_and_generates_nothing_had_not_arrived(
    project: Project, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(project)
    engine.up, engine.image = {"producer": 2}, NEW

    def silent(*_: object) -> str:
        raise UserError("it generated nothing")

    monkeypatch.setattr(swap, "smoke_serving", silent)
    swap.settle(project, CONSOLE)
    assert last(project).event == "undone"
    assert engine.image == OLD


def test_a_phase_that_is_given_again_and_fails_takes_nothing_down_that_was_up(project: Project, engine: Engine) -> None:
    engine.up = {"sglang": 1, "producer": 3}
    engine.starting = [UserError("producer-4 is not healthy")]
    with pytest.raises(UserError, match="sglang, producer up again"):
        phase.go_to_phase(project, "generate", CONSOLE)
    assert engine.up == {"sglang": 1, "producer": 3}


def test_a_phase_that_fails_leaves_nothing_of_the_new_side(project: Project, engine: Engine) -> None:
    engine.up = {"trainer": 1}
    engine.starting = [UserError("sglang is not healthy")]
    with pytest.raises(UserError, match="trainer up again"):
        phase.go_to_phase(project, "generate", CONSOLE)
    assert scales(engine.containers(project, list(project.services))) == {"trainer": 1}
    assert "COMPOSE_PROFILES=generate" in project.env_file.read_text()
