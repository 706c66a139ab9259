"""The stack of compose.cpu.yaml under a project name of its own, and the commands that operate it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.settings import Settings
from services.stack.demo.containers import write_stack_files

ROOT = Path(__file__).parents[2]
VERSION = os.environ.get("VERSION", "dev")
# Where no registry or index has them: the base of all images, and wheels on this machine's disk.
BUILD = ("WHEELHOUSE", "BASE_IMAGE")


@dataclass(frozen=True)
class StackUnderTest:
    """A stack's .env, and what it is asked; a failing command fails the test with its own words."""

    env_file: Path

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["docker", "compose", "--env-file", str(self.env_file), "--profile", "*", *arguments]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        said = f"{arguments}: {finished.stdout[-2000:]}\n{finished.stderr[-6000:]}"
        assert not check or finished.returncode == 0, said
        return finished

    def operator(self, *arguments: str) -> str:
        """A command of the stages, in the stack's network."""
        return self.compose("run", "--rm", "--no-TTY", "operator", *arguments).stdout

    def operate(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command that operates the stack, on the host."""
        command = [sys.executable, "-m", "services.stack", *arguments, "--env-file", str(self.env_file)]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert not check or finished.returncode == 0, f"{arguments}: {finished.stdout}\n{finished.stderr}"
        return finished

    def up(self, *services: str) -> None:
        up = self.compose("up", "--detach", "--wait", "--wait-timeout", "600", *services, check=False)
        if up.returncode != 0:
            logs = self.compose("logs", "--tail", "30").stdout
            raise AssertionError(f"{up.stderr[-2000:]}\n{logs[-8000:]}")

    def containers(self, *services: str) -> list[dict[str, Any]]:
        lines = self.compose("ps", "--format", "json", *services).stdout.splitlines()
        return [json.loads(line) for line in lines]

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")


def make_stack(folder: Path, settings: Settings, project: str, variables: Mapping[str, str]) -> StackUnderTest:
    """The .env of a stack in `folder`; `variables` come beside what the demo's has."""
    env_file = folder / "env"
    write_stack_files(settings, folder, env_file)
    more = {"COMPOSE_PROJECT_NAME": project, "VERSION": VERSION, **variables}
    more |= {name: os.environ[name] for name in BUILD if name in os.environ}
    kept = [line for line in env_file.read_text().splitlines() if line.partition("=")[0] not in more]
    env_file.write_text("\n".join([*kept, *(f"{name}={value}" for name, value in more.items())]) + "\n")
    return StackUnderTest(env_file)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.5)
