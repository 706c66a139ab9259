"""A user's checkout goes to another version; what is theirs stays, and what changed is told."""

import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from services.errors import UserError
from services.stack.operate.upgrade import upgrade
from services.stack.render import render

COMPOSE = (Path(__file__).parents[4] / "compose.yaml").read_text()
MINE = "# mine\nMODEL_DIR=/models/x\nVERSION=dev\n"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commit(folder: Path, version: str, example: str, torch: str, compose: str) -> None:
    (folder / "images").mkdir(exist_ok=True)
    (folder / ".env.example").write_text(example)
    (folder / "images" / "versions.toml").write_text(f'[trainer.cpu]\ntorch = "{torch}"\n')
    (folder / "compose.yaml").write_text(compose)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", version)
    git(folder, "tag", version)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone at v1.0 of a project whose newest version is v1.10, with the user's own .env."""
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    git(upstream, "init", "--quiet")
    (upstream / ".gitignore").write_text(".env*\n!.env.example\n")
    commit(upstream, "v1.0", "MODEL_DIR=\nVERSION=dev\n#OLD=1\n", "2.13.0", COMPOSE)
    commit(upstream, "v1.9", "MODEL_DIR=\nVERSION=dev\n#OLD=1\n", "2.13.0", COMPOSE + "# between\n")
    newer = COMPOSE.replace("--chunked-prefill-size=2048", "--chunked-prefill-size=4096")
    commit(upstream, "v1.10", "MODEL_DIR=\nVERSION=1\n# What it is.\n#PRODUCERS=1\n", "2.14.1", newer)
    git(tmp_path, "clone", "--quiet", str(upstream), "checkout")
    git(tmp_path / "checkout", "reset", "--quiet", "--hard", "v1.0")
    (tmp_path / "checkout" / ".env").write_text(MINE)
    return tmp_path / "checkout"


def run(checkout: Path, reference: str | None = None, dry_run: bool = False) -> str:
    console = Console(record=True, width=200, file=(checkout.parent / "said").open("w"))
    upgrade(checkout, checkout / ".env", reference, dry_run, console)
    return console.export_text()


def test_env_stays_and_what_changed_is_told(checkout: Path) -> None:
    said = run(checkout)
    assert git(checkout, "describe", "--tags").strip() == "v1.10"
    assert (checkout / ".env").read_text() == MINE + "\n# New with v1.10, see .env.example:\n#PRODUCERS=1\n"
    (kept,) = checkout.glob(".env.before-*")
    assert kept.read_text() == MINE
    for line in (
        ".env: new #PRODUCERS=1",
        ".env: OLD is not read any more",
        ".env: default VERSION=dev -> VERSION=1",
        "trainer.cpu torch: 2.13.0 -> 2.14.1",
    ):
        assert line in said
    assert "v1.10 is what is here" in run(checkout)


def test_a_dry_run_tells_the_same_and_changes_nothing(checkout: Path) -> None:
    assert "trainer.cpu torch: 2.13.0 -> 2.14.1" in run(checkout, dry_run=True)
    assert git(checkout, "describe", "--tags").strip() == "v1.0"
    assert (checkout / ".env").read_text() == MINE
    assert not list(checkout.glob(".env.before-*"))


def test_a_stack_rendered_for_four_cards_is_rendered_for_four_again(checkout: Path) -> None:
    (checkout / "compose.yaml").write_text(render(COMPOSE, 4))
    assert "compose.yaml is rendered for 4 cards again" in run(checkout)
    text = (checkout / "compose.yaml").read_text()
    assert text == render(git(checkout, "show", "v1.10:compose.yaml"), 4)
    assert "4096" in text


def test_changes_of_the_users_own_are_not_lost(checkout: Path) -> None:
    changed = COMPOSE.replace("mem_limit: 96g", "mem_limit: 64g")
    (checkout / "compose.yaml").write_text(changed)
    with pytest.raises(UserError, match=r"compose\.yaml: changed here; commit or `git stash` that"):
        run(checkout)
    assert (checkout / "compose.yaml").read_text() == changed
    assert git(checkout, "describe", "--tags").strip() == "v1.0"


def test_a_version_that_is_not_there_is_named(checkout: Path) -> None:
    with pytest.raises(UserError, match="there is no version 'v9'"):
        run(checkout, "v9")
    assert (checkout / ".env").read_text() == MINE
