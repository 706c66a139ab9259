"""Whether this host can run the stack: one line a check, and beside what fails what to do about it."""

import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from services.errors import UserError
from services.secret_files import read_secret
from services.settings import load_settings
from services.stack.operate.engine import attempt, containers, docker, inspect_image, last_line
from services.stack.operate.env_file import read_variables
from services.stack.operate.gpus import IDLE_BYTES, missing_cards, older_than_needed, read_cards, read_holders
from services.stack.operate.images import variants
from services.stack.operate.project import SIDES, Project, open_project
from services.stack.operate.secret_folder import EXPORTER, GRAFANA, NAMES, REDIS

State = Literal["ok", "warning", "wrong"]
# The first that knows a health check's start_interval.
OLDEST_ENGINE = (25, 0)
OLDEST_COMPOSE = (2, 24)
FREE_BYTES_WRONG = 5 * 10**9
FREE_BYTES_WARNING = 50 * 10**9
READABLE_BY_ALL = 0o4
OPEN_TO_ALL = 0o5


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it is, and what to do where it is not well."""

    name: str
    state: State
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.state:<8} {self.name:<13} {self.detail}{remedy}"


def examine(folder: Path, env_file: Path) -> Iterator[Check]:
    """Every check of a host and of what .env names, as each is done; without an engine there are no more than its own.

    Raises:
        UserError: there is no .env, or a file of the configuration is wrong.
    """
    engine = list(check_engine())
    yield from engine
    if any(check.state == "wrong" for check in engine):
        return
    project = open_project(folder, env_file)
    if project.uses_gpus:
        yield from _or_wrong("driver", lambda: check_cards(project))
        yield check_toolkit()
    wanted = set(read_variables(project.env_file).get("COMPOSE_PROFILES", "").split(",")) | set(SIDES)
    services = {name: one for name, one in project.services.items() if wanted.intersection(one.get("profiles", SIDES))}
    yield check_disk(Path(docker("info", "--format", "{{.DockerRootDir}}").strip()))
    yield from check_memory(services, int(docker("info", "--format", "{{.MemTotal}}")))
    yield from check_ports(services, {one.service for one in containers(project.name) if one.alive})
    yield from check_files(project)
    yield from _or_wrong("secrets", lambda: check_secrets(project))
    yield from check_images(services)


def check_engine() -> Iterator[Check]:
    """Docker and Compose: there, answering, and new enough."""
    engine = attempt("version", "--format", "{{.Server.Version}}")
    if engine.returncode != 0:
        said = last_line(engine.stderr) or "no answer"
        yield Check("docker", "wrong", said, "start the engine: systemctl start docker")
        return
    yield _version_check("docker", engine.stdout.strip(), OLDEST_ENGINE)
    plugin = attempt("compose", "version", "--short")
    if plugin.returncode != 0:
        yield Check("compose", "wrong", "docker has no compose plugin", "install docker-compose-plugin")
        return
    yield _version_check("compose", plugin.stdout.strip().lstrip("v"), OLDEST_COMPOSE)


def _version_check(name: str, version: str, oldest: tuple[int, int]) -> Check:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < oldest:
        return Check(name, "wrong", f"{version} is too old", f"install {oldest[0]}.{oldest[1]} or later")
    return Check(name, "ok", version)


def check_cards(project: Project) -> Iterator[Check]:
    """Driver and cards: there, as many as are configured, and held by nobody but this stack."""
    cards = read_cards()
    if not cards:
        yield Check(
            "GPUs", "wrong", "nvidia-smi finds no card", "see `dmesg | grep -i nvidia`; or use compose.cpu.yaml"
        )
        return
    yield _check_driver(project, cards[0].driver)
    asked = {card for name in project.services for card in project.cards(name) or []}
    if missing := missing_cards(asked, cards):
        remedy = f"dflash-stack render --gpus {len(cards)} --output compose.yaml"
        yield Check("GPUs", "wrong", f"{len(cards)} cards, and {', '.join(missing)} is configured too", remedy)
    else:
        yield Check("GPUs", "ok", f"{len(cards)} x {cards[0].name}, {cards[0].total / 2**30:,.0f} GiB each")
    ours = {container.name for container in containers(project.name)}
    others = [holder for holder in read_holders(cards) if holder.container not in ours]
    for holder in others:
        yield Check("GPU memory", "wrong", str(holder), f"end it: kill {holder.pid}")
    if not others and any(card.used > IDLE_BYTES for card in cards):
        yield Check("GPU memory", "ok", "in use by this stack's containers only")


def _check_driver(project: Project, driver: str) -> Check:
    needed = older_than_needed(driver, variants(str(service["image"]) for service in project.services.values()))
    if needed is not None:
        return Check("driver", "wrong", f"{driver}, and the images' CUDA needs {needed}", f"install driver {needed}")
    return Check("driver", "ok", driver)


def check_toolkit() -> Check:
    """NVIDIA's container toolkit: as a runtime of the engine, as the hook that it looks for, or by CDI."""
    runtime = "nvidia" in docker("info", "--format", "{{json .Runtimes}}")
    hook = shutil.which("nvidia-container-runtime-hook") is not None
    if runtime or hook or any(any(Path(folder).glob("nvidia*")) for folder in ("/etc/cdi", "/var/run/cdi")):
        return Check("toolkit", "ok", "the engine knows NVIDIA's container runtime")
    remedy = "install nvidia-container-toolkit, then nvidia-ctk runtime configure --runtime=docker"
    return Check("toolkit", "wrong", "the engine has no NVIDIA runtime", remedy)


def check_disk(root: Path) -> Check:
    """Room in the folder in which the engine keeps images and volumes."""
    try:
        free = shutil.disk_usage(root).free
    except OSError:
        return Check("disk", "warning", f"{root} is not on this machine; look at the engine's own")
    state: State = "wrong" if free < FREE_BYTES_WRONG else "warning" if free < FREE_BYTES_WARNING else "ok"
    remedy = "" if state == "ok" else "docker image prune, or move the engine's data-root"
    return Check("disk", state, f"{free / 1e9:,.0f} GB free in {root}", remedy)


def check_memory(services: Mapping[str, Any], total: int) -> Iterator[Check]:
    """Memory limits and shared memory against the host's `total` bytes."""
    limits = {name: int(service.get("mem_limit", 0)) for name, service in services.items()}
    largest = max(limits, key=lambda name: limits[name])
    if limits[largest] > total:
        detail = f"{total / 2**30:,.0f} GiB, and {largest} may use {limits[largest] / 2**30:,.0f}"
        yield Check("memory", "warning", detail, f"lower mem_limit of {largest}, or expect the kernel to end processes")
    else:
        yield Check("memory", "ok", f"{total / 2**30:,.0f} GiB; the largest limit is {largest}'s")
    shared = {name: int(service["shm_size"]) for name, service in services.items() if "shm_size" in service}
    most = sum(shared.values())
    state: State = "warning" if most > total / 2 else "ok"
    remedy = "lower shm_size, which is memory too" if state == "warning" else ""
    yield Check("shared memory", state, f"{most / 2**30:,.0f} GiB in {len(shared)} services", remedy)


def check_ports(services: Mapping[str, Any], up: set[str]) -> Iterator[Check]:
    """The ports that services publish; those that are up hold theirs."""
    for name, service in services.items():
        for port in service.get("ports", []):
            address, first, last = port.get("host_ip", "0.0.0.0"), *_published(port)
            if name in up or not last:
                continue
            where = f"{address}:{first if first == last else f'{first}-{last}'}, for {name}"
            # Of a range, Compose takes one that is free.
            if all(_is_taken(address, number) for number in range(first, last + 1)):
                remedy = f"end what listens there (ss -ltnp 'sport = :{first}'), or set another port in .env"
                yield Check("port", "wrong", f"{where}: in use", remedy)
            else:
                yield Check("port", "ok", f"{where}: free")


def _published(port: Mapping[str, Any]) -> tuple[int, int]:
    """First and last port of the host, as Compose renders them: "3000", "3000-3010"; 0 where the engine chooses."""
    first, _, last = str(port.get("published") or 0).partition("-")
    return int(first), int(last or first)


def _is_taken(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return True
    return False


def check_files(project: Project) -> Iterator[Check]:
    """The files that .env names, as containers mount them and as their users can read them."""
    mounted = _mounted(project)
    yield from _or_wrong("model", partial(_check_model, mounted["/model"]))
    data = mounted["/data"]
    if not data.is_dir():
        yield Check("data", "wrong", f"{data} is no folder", "set DATA_DIR to the folder of prompts and corpus")
    elif data.stat().st_mode & OPEN_TO_ALL != OPEN_TO_ALL:
        yield Check("data", "wrong", f"{data} is for its owner only", f"chmod -R a+rX {data}")
    else:
        yield Check("data", "ok", str(data))
    yield from _or_wrong("config", lambda: _check_config(project, mounted["/config/config.yaml"]))


def _check_model(model: Path) -> Iterator[Check]:
    lacking = [name for name in ("config.json", "tokenizer.json") if not (model / name).is_file()]
    if not any(model.glob("*.safetensors")):
        lacking.append("*.safetensors")
    if lacking:
        yield Check("model", "wrong", f"{model} has no {', '.join(lacking)}", "set MODEL_DIR to the model's folder")
        return
    for path in sorted(model.iterdir()):
        if not path.resolve().is_relative_to(model.resolve()):
            # As the hub's cache has them: only this folder is mounted.
            what = f"{path} is a link out of the folder, and ends nowhere in a container"
            remedy = f"cp --recursive --dereference {model} ELSEWHERE, and set MODEL_DIR to that"
            yield Check("model", "wrong", what, remedy)
            return
    private = [path.name for path in model.iterdir() if path.exists() and not path.stat().st_mode & READABLE_BY_ALL]
    if private or model.stat().st_mode & OPEN_TO_ALL != OPEN_TO_ALL:
        what = f"{model}: {private[0]}" if private else str(model)
        yield Check("model", "wrong", f"{what} is for its owner only", f"chmod -R a+rX {model}")
    else:
        yield Check("model", "ok", str(model))


def _check_config(project: Project, path: Path) -> Iterator[Check]:
    settings = load_settings(path)
    served = read_variables(project.env_file).get("SERVED_NAME", "")
    if not path.stat().st_mode & READABLE_BY_ALL:
        yield Check("config", "wrong", f"{path} is for its owner only", f"chmod a+r {path}")
        return
    if settings.target.served_name != served:
        detail = f"SERVED_NAME is {served!r}, and {path} has target.served_name {settings.target.served_name!r}"
        yield Check("config", "wrong", detail, "make them the same")
    else:
        yield Check("config", "ok", str(path))


def check_secrets(project: Project) -> Iterator[Check]:
    """The folder of secrets: there, closed to others, and nothing in it a placeholder."""
    folder = project.secrets["redis_password"].parent
    if not folder.is_dir():
        yield Check("secrets", "wrong", f"there is no folder {folder}", "dflash-stack secrets")
        return
    if folder.stat().st_mode & 0o077:
        yield Check("secrets", "wrong", f"{folder} is open to other users of this machine", f"chmod 700 {folder}")

    missing = [name for name in NAMES if not (folder / name).is_file()]
    if missing:
        yield Check("secrets", "wrong", f"{folder} has no {', '.join(missing)}", "dflash-stack secrets")
    for name in NAMES:
        if name not in missing:
            yield from _or_wrong("secrets", partial(_check_secret, folder / name))


def _check_secret(path: Path) -> Iterator[Check]:
    if path.name in {REDIS, GRAFANA}:
        read_secret(path)
    password = path.with_name(REDIS)
    if path.name == EXPORTER and password.is_file() and password.read_text().strip() not in path.read_text():
        remedy = f"rm -f {path}; dflash-stack secrets"
        yield Check("secrets", "wrong", f"{path} has another password than {REDIS}", remedy)
    elif path.stat().st_mode & READABLE_BY_ALL:
        yield Check("secrets", "ok", str(path))
    else:
        # In the containers other users read it; on the host the folder keeps them out.
        yield Check("secrets", "wrong", f"{path} cannot be read in the containers", f"chmod 444 {path}")


def check_images(services: Mapping[str, Any]) -> Iterator[Check]:
    """The images: ours have to be built or loaded, others are pulled by Compose."""
    for name in sorted({str(service["image"]) for service in services.values()}):
        if inspect_image(name) is None and name.startswith("dflash-stack/"):
            yield Check("image", "wrong", f"{name} is not here", "make build")
        elif inspect_image(name) is None:
            remedy = "it is pulled when it is needed; without a registry: docker load"
            yield Check("image", "warning", f"{name} is not here", remedy)
        else:
            yield Check("image", "ok", name)


def _or_wrong(name: str, check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """A check's lines; a user's mistake on the way is a line too."""
    try:
        yield from check()
    except UserError as error:
        said, _, remedy = str(error).partition("; ")
        yield Check(name, "wrong", said, remedy)
    except PermissionError as error:
        remedy = "run this as the owner, or give this user the right to read it"
        yield Check(name, "wrong", f"{error.filename}: {error.strerror}", remedy)


def _mounted(project: Project) -> dict[str, Path]:
    """What of this machine each target in the containers is, as Compose has read .env."""
    volumes = [one for service in project.services.values() for one in service.get("volumes", [])]
    return {one["target"]: Path(one["source"]) for one in volumes if one["type"] == "bind"}
