"""The Compose project that is operated: its rendered configuration, and what follows from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from services.errors import UserError
from services.stack.operate.engine import Container, attempt, containers, last_line

Role = Literal["sglang", "producer", "tokenizer", "trainer"]
ROLES: tuple[Role, ...] = ("sglang", "producer", "tokenizer", "trainer")
# The profiles whose services share the cards: one of them is up at a time.
Side = Literal["generate", "train"]
SIDES: tuple[Side, ...] = ("generate", "train")


@dataclass(frozen=True)
class Project:
    """A checkout's stack as .env configures it.

    `services` is what `docker compose config` says of each, `secrets` where each secret's file is.
    """

    folder: Path
    env_file: Path
    name: str
    services: Mapping[str, Any]
    secrets: Mapping[str, Path] = field(default_factory=dict)

    @property
    def releases(self) -> Path:
        return releases_file(self.env_file)

    def of_role(self, role: Role) -> list[str]:
        """The services that run a role's image, in order."""
        dockerfile = f"images/{role}/Dockerfile"
        return sorted(
            name
            for name, service in self.services.items()
            if str(service.get("build", {}).get("dockerfile", "")).endswith(dockerfile)
        )

    def of_side(self, side: Side) -> list[str]:
        """The services of a profile, in order."""
        return sorted(name for name, service in self.services.items() if side in service.get("profiles", []))

    def image(self, role: Role) -> str:
        """The name of the image that a role's services are configured to run."""
        images = {str(self.services[name]["image"]) for name in self.of_role(role)}
        if len(images) != 1:
            raise UserError(f"services of {role} have {len(images)} different images: {', '.join(sorted(images))}")
        return images.pop()

    def cards(self, service: str) -> list[str] | None:
        """The ids of the cards that a service asks for, None for all of them, [] for none."""
        reservations = self.services[service].get("deploy", {}).get("resources", {}).get("reservations", {})
        devices = [device for device in reservations.get("devices", []) if "gpu" in device.get("capabilities", [])]
        if any("device_ids" not in device for device in devices):
            return None
        return [str(card) for device in devices for card in device["device_ids"]]

    def takes_cards(self, role: Role) -> bool:
        """Whether services of a role ask for cards."""
        return any(self.cards(name) != [] for name in self.of_role(role))

    def mounted(self, service: str) -> list[Path]:
        """What a service mounts of this machine: files, folders and secrets."""
        content = self.services[service]
        bound = [Path(one["source"]) for one in content.get("volumes", []) if one["type"] == "bind"]
        return bound + [self.secrets[one["source"]] for one in content.get("secrets", [])]

    @property
    def uses_gpus(self) -> bool:
        return any(self.cards(name) != [] for name in self.services)


def releases_file(env_file: Path) -> Path:
    """Where the record of a stack's images is; a folder of its own, which the exporter sees."""
    return env_file.with_name("operations") / "releases.jsonl"


def open_project(folder: Path, env_file: Path) -> Project:
    """The project of a checkout.

    Raises:
        UserError: there is no .env, it lacks a variable, or a file of the configuration is wrong.
    """
    if not env_file.is_file():
        raise UserError(f"there is no {env_file}: copy .env.example and fill it in (with no GPU: make up-cpu)")
    finished = attempt(*_compose(env_file), "--profile", "*", "config", "--format", "json", folder=folder)
    if finished.returncode != 0:
        raise UserError(f"docker compose config: {last_line(finished.stderr)}")
    content = json.loads(finished.stdout)
    secrets = {name: Path(one["file"]) for name, one in content.get("secrets", {}).items() if "file" in one}
    return Project(folder, env_file, content["name"], content["services"], secrets)


def compose(project: Project, *arguments: str, stdin: str | None = None) -> str:
    """What `docker compose` printed, with every profile open: which services are meant is always said.

    Raises:
        UserError: it failed, with its own last line.
    """
    finished = attempt(*command(project), *arguments, folder=project.folder, stdin=stdin)
    if finished.returncode != 0:
        raise UserError(f"docker compose {arguments[0]}: {last_line(finished.stderr) or finished.returncode}")
    return finished.stdout


def command(project: Project) -> tuple[str, ...]:
    """What follows `docker` for Compose to see all of the project."""
    return (*_compose(project.env_file), "--profile", "*")


def alive(project: Project, services: list[str]) -> list[Container]:
    """The containers of these services that hold a process, by name."""
    found = [one for one in containers(project.name) if one.service in services and one.alive]
    return sorted(found, key=lambda one: one.name)


def cards_taken(project: Project) -> bool:
    """Whether services that hold cards are up."""
    services = [name for side in SIDES for name in project.of_side(side)]
    return project.uses_gpus and bool(alive(project, services))


def scales(of: list[Container]) -> dict[str, int]:
    """How many containers of each service there are, those of `docker compose run` left out."""
    counted: dict[str, int] = {}
    for container in of:
        if not container.one_off:
            counted[container.service] = counted.get(container.service, 0) + 1
    return counted


def stop(project: Project, services: list[str]) -> list[Container]:
    """Stop services as their stop_grace_period allows, and return the containers that had to be killed."""
    before = {container.id for container in alive(project, services) if not container.one_off}
    if not before:
        return []
    compose(project, "stop", *services)
    return [one for one in containers(project.name) if one.id in before and one.exit_code == 137]


def start(project: Project, counts: Mapping[str, int], alone: bool = False, kept: bool = False) -> None:
    """Start so many containers of each service, after what they depend on unless `alone`, and wait for their health.

    Those that are up stay as they are when `kept`; else Compose makes them anew where their configuration changed,
    and it takes `alone` for such a change.

    Raises:
        UserError: one is not healthy in time; its last words are told.
    """
    if not counts:
        return
    scale = [part for name, count in counts.items() for part in ("--scale", f"{name}={count}")]
    options = ("--detach", "--no-build", "--wait", "--wait-timeout", str(_patience(project, list(counts))), *scale)
    options += (*(["--no-deps"] if alone else []), *(["--no-recreate"] if kept else []))
    finished = attempt(*command(project), "up", *options, *counts, folder=project.folder)
    if finished.returncode != 0:
        raise UserError(_why_not_healthy(project, list(counts)) or f"docker compose up: {last_line(finished.stderr)}")


def _patience(project: Project, services: list[str]) -> int:
    """How long services may take to get healthy: their health checks' start period and its retries, and a minute."""
    checks = [project.services[name].get("healthcheck", {}) for name in services]
    periods = [
        _seconds(check.get("start_period", "0s"))
        + _seconds(check.get("interval", "30s")) * int(check.get("retries", 3))
        for check in checks
    ]
    return int(max(periods, default=0)) + 60


def _why_not_healthy(project: Project, services: list[str]) -> str | None:
    for container in containers(project.name):
        if container.service not in services or container.one_off:
            continue
        if container.state != "running" or container.health == "unhealthy":
            said = attempt("logs", "--tail", "5", container.id)
            words = last_line(said.stderr) or last_line(said.stdout) or "it said nothing"
            state = container.health if container.state == "running" else f"{container.state}, {container.exit_code}"
            return f"{container.name} is not healthy ({state}): {words}; see `docker logs {container.name}`"
    return None


def _seconds(duration: str) -> float:
    """Seconds of a duration as Compose renders it: 1h2m3.5s."""
    total, number = 0.0, ""
    for character in duration:
        if character.isdigit() or character == ".":
            number += character
        elif number:
            total += float(number) * {"h": 3600, "m": 60, "s": 1}.get(character, 0)
            number = ""
    return total


def _compose(env_file: Path) -> tuple[str, ...]:
    return ("compose", "--env-file", str(env_file.absolute()))
