"""Swaps, rollbacks, phases and memory budgets on a real engine, with images that start in a moment."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
MINIATURE = Path(__file__).parent / "miniature"
ROLES = ("sglang", "producer", "trainer")
# Tags of the producer, and how each is made.
TAGS = {
    "next": ("next", "3.1.0", "well"),
    "heavy": ("cpu", "3.0.0", "heavy"),
    "broken": ("cpu", "3.0.0", "broken"),
    "unhealthy": ("cpu", "3.0.0", "unhealthy"),
    "other": ("cpu", "2.9.0", "well"),
}


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The images, under a tag of their own."""
    tag = f"miniature-{os.getpid()}"
    base = ["--build-arg", f"BASE_IMAGE={os.environ['BASE_IMAGE']}"] if "BASE_IMAGE" in os.environ else []

    def build(role: str, name: str, variant: str = "cpu", rq: str = "3.0.0", kind: str = "well") -> None:
        arguments = {"ROLE": role, "VARIANT": variant, "RQ": rq, "KIND": kind, "OWNER": tag}
        options = [part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")]
        docker("build", "--quiet", *base, *options, "--tag", f"dflash-stack/{role}:{name}", str(MINIATURE))

    for role in ROLES:
        build(role, f"cpu-{tag}")
    for name, (variant, rq, kind) in TAGS.items():
        build("producer", f"{name}-{tag}", variant, rq, kind)
    yield tag
    listed = docker(
        "image", "ls", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}", "--filter", "reference=dflash-stack/*"
    )
    mine = {line.split()[1] for line in listed.splitlines() if tag in line}
    docker("image", "rm", "--force", *(line.split()[0] for line in listed.splitlines() if line.split()[1] in mine))


@pytest.fixture
def project(version: str, tmp_path: Path) -> Iterator[Path]:
    """A checkout with the miniature stack, nothing of it up."""
    shutil.copytree(MINIATURE, tmp_path / "checkout")
    folder = tmp_path / "checkout"
    for role in ROLES:
        (folder / "images" / role).mkdir(parents=True)
        shutil.copy(folder / "Dockerfile", folder / "images" / role / "Dockerfile")
    shutil.move(folder / "versions.toml", folder / "images" / "versions.toml")
    shutil.copy(ROOT / "images" / "check_versions.py", folder / "images")
    name = f"dflash-miniature-{os.getpid()}"
    (folder / ".env").write_text(f"# mine\nVERSION={version}\nCOMPOSE_PROJECT_NAME={name}\n")
    try:
        yield folder
    finally:
        subprocess.run(
            ["docker", "compose", "--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "1"],
            cwd=folder,
            check=True,
            capture_output=True,
        )


def operate(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = ["--folder", str(project), "--env-file", str(project / ".env")]
    return subprocess.run(
        [sys.executable, "-m", "services.stack", *arguments, *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )


def succeed(project: Path, *arguments: str) -> str:
    finished = operate(project, *arguments)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def error_of(project: Path, *arguments: str) -> str:
    finished = operate(project, *arguments)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    (line,) = finished.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def up(project: Path) -> dict[str, str]:
    """The image of each service that is up, and that it is healthy."""
    lines = compose(project, "ps", "--format", "json").splitlines()
    content: list[dict[str, Any]] = [one for one in map(json.loads, lines) if "-run-" not in one["Name"]]
    assert all(one["Health"] == "healthy" for one in content), content
    return {one["Service"]: docker("inspect", "--format", "{{.Image}}", one["ID"]).strip() for one in content}


def compose(project: Path, *arguments: str) -> str:
    command = ["docker", "compose", "--profile", "*", *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout


def image(name: str) -> str:
    return docker("image", "inspect", "--format", "{{.Id}}", name).strip()


def entries(project: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project / "operations" / "releases.jsonl").read_text().splitlines()]


def test_a_swap_is_recorded_and_a_rollback_undoes_it(project: Path, version: str) -> None:
    succeed(project, "phase", "generate")
    old, new = image(f"dflash-stack/producer:cpu-{version}"), image(f"dflash-stack/producer:next-{version}")
    told = succeed(project, "swap", "producer", "next", "--why", "a newer queue")
    assert "rq 3.0.0 -> 3.1.0" in told
    assert up(project)["producer"] == new
    done = entries(project)[-1]
    assert (done["event"], done["action"], done["why"]) == ("done", "swap", "a newer queue")
    assert (done["before"]["image"], done["to"]["image"]) == (old, new)
    assert done["to"]["contents"]["rq"] == "3.1.0"
    assert done["budget"]["resident"]["import"] > 0

    succeed(project, "rollback", "producer")
    assert up(project)["producer"] == old
    shown = subprocess.run(
        [sys.executable, "-m", "services.stack", "history", "--env-file", str(project / ".env")],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert shown.index("swap producer") < shown.index("rollback producer")
    assert "no swap to go back from" in error_of(project, "rollback", "producer")


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ("broken", r"smoke check of producer failed: ImportError: undefined symbol: _ZN3c104cuda9SetDeviceEi"),
        ("unhealthy", "is not healthy"),
        ("heavy", "resident import"),
    ],
)
def test_a_bad_candidate_is_rolled_back_by_itself(project: Path, version: str, tag: str, said: str) -> None:
    succeed(project, "phase", "generate")
    before, setting = up(project), (project / ".env").read_text()
    error = error_of(project, "swap", "producer", f"{tag}-{version}")
    assert said in error
    assert up(project) == before
    assert (project / ".env").read_text() == setting
    if tag == "heavy":
        assert "margin 100 MB" in error
        assert [entry["event"] for entry in entries(project)] == ["measured", "measured"]
    else:
        assert "is in its place again" in error
        assert entries(project)[-1]["event"] == "undone"


def test_what_cannot_be_swapped_is_said_and_nothing_is_touched(project: Path, version: str) -> None:
    assert "image dflash-stack/producer:no-such is not here" in error_of(project, "swap", "producer", "no-such")
    other_role = f"dflash-stack/trainer:cpu-{version}"
    assert "is one of trainer, not of producer" in error_of(project, "swap", "producer", other_role)
    assert "rq: must be 3.0.0, is 2.9.0" in error_of(project, "swap", "producer", f"other-{version}")
    assert "'redis' has no image of this project" in error_of(project, "swap", "redis", "cpu")
    assert not (project / "operations" / "releases.jsonl").exists()


def test_a_phase_whose_image_is_not_there_stops_nothing(project: Path) -> None:
    succeed(project, "phase", "train")
    with (project / ".env").open("a") as file:
        file.write("PRODUCER_IMAGE=dflash-stack/producer:no-such\n")
    assert "image dflash-stack/producer:no-such is not here" in error_of(project, "phase", "generate")
    assert set(up(project)) == {"trainer"}


def test_a_swap_on_a_full_disk_changes_nothing(project: Path, version: str) -> None:
    succeed(project, "phase", "generate")
    before, setting = up(project), (project / ".env").read_text()
    disk = project / "operations"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", disk], check=True)
    try:
        (disk / "filling").write_bytes(bytes(4096))
        assert "the disk is full" in error_of(project, "swap", "producer", "next")
        assert up(project) == before
        assert (project / ".env").read_text() == setting
        (disk / "filling").unlink()
        succeed(project, "swap", "producer", "next")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_killed_swap_is_undone_by_the_next_command(project: Path, version: str) -> None:
    succeed(project, "phase", "generate")
    before = up(project)
    command = [
        "swap",
        "producer",
        f"unhealthy-{version}",
        "--folder",
        str(project),
        "--env-file",
        str(project / ".env"),
    ]
    swapping = subprocess.Popen([sys.executable, "-m", "services.stack", *command], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 120
    while "PRODUCER_IMAGE" not in (project / ".env").read_text():
        assert swapping.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(swapping.pid, signal.SIGKILL)
    swapping.wait()
    told = succeed(project, "phase", "generate")
    assert "an interrupted swap to" in told
    assert "is undone" in told
    assert up(project) == before
    assert entries(project)[-1]["event"] == "undone"


def test_scaling_leaves_those_that_work_alone(project: Path) -> None:
    succeed(project, "phase", "generate")
    first = docker("ps", "--quiet", "--filter", f"name=dflash-miniature-{os.getpid()}-producer")
    for count in (3, 2):
        succeed(project, "scale", str(count))
        there = docker("ps", "--quiet", "--filter", f"name=dflash-miniature-{os.getpid()}-producer").split()
        assert len(there) == count
        assert first.strip() in there
        assert f"PRODUCERS={count}" in (project / ".env").read_text()


def test_the_phases_never_overlap_and_a_stubborn_process_is_killed(project: Path) -> None:
    succeed(project, "phase", "generate")
    assert set(up(project)) == {"sglang", "producer"}
    succeed(project, "phase", "train")
    assert set(up(project)) == {"trainer"}
    assert "COMPOSE_PROFILES=train" in (project / ".env").read_text()
    (project / "compose.override.yaml").write_text("services: {trainer: {command: [stubborn]}}\n")
    compose(project, "up", "--detach", "--wait", "trainer")
    told = succeed(project, "phase", "generate")
    assert "trainer-1 did not end within its grace and was killed" in told
    assert set(up(project)) == {"sglang", "producer"}
    succeed(project, "phase", "idle")
    assert up(project) == {}


def test_a_process_that_is_not_a_services_own_is_named_before_anything_is_stopped(project: Path) -> None:
    succeed(project, "phase", "train")
    container = compose(project, "run", "--detach", "trainer", "stubborn").strip()
    pid = docker("inspect", "--format", "{{.State.Pid}}", container).strip()
    error = error_of(project, "phase", "generate")
    assert f"pid {pid} (python /app/serve.py stubborn), container " in error
    assert "MiB; end it first. Nothing was changed" in error
    assert set(up(project)) == {"trainer"}
    docker("rm", "--force", container)
    succeed(project, "phase", "generate")


def test_a_side_that_does_not_get_healthy_gives_way_to_the_one_before(project: Path, version: str) -> None:
    succeed(project, "phase", "train")
    with (project / ".env").open("a") as file:
        file.write(f"PRODUCER_IMAGE=dflash-stack/producer:unhealthy-{version}\n")
    error = error_of(project, "phase", "generate")
    assert "producer-1 is not healthy" in error
    assert "trainer up again" in error
    assert set(up(project)) == {"trainer"}
    assert "COMPOSE_PROFILES=train" in (project / ".env").read_text()


def test_an_image_is_compared_with_what_was_recorded_for_the_one_in_use(project: Path, version: str) -> None:
    assert "first `dflash-stack budget measure producer`" in error_of(project, "budget", "check", "producer")
    succeed(project, "budget", "measure", "producer")
    succeed(project, "budget", "check", "producer")
    error = error_of(project, "budget", "check", "producer", f"heavy-{version}")
    assert "holds more memory than recorded: resident import" in error
    succeed(project, "budget", "check", "producer", f"heavy-{version}", "--margin", "250")
