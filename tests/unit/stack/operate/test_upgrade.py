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


def test_an_older_version_is_not_said_to_be_here(checkout: Path) -> None:
    run(checkout)
    with pytest.raises(UserError, match=r"'v1\.0' is older than what is here; `git checkout v1\.0` goes back to it"):
        run(checkout, "v1.0")
    assert git(checkout, "describe", "--tags").strip() == "v1.10"


def test_a_checkout_that_is_ahead_of_the_newest_tag_is_left(checkout: Path) -> None:
    run(checkout)
    git(checkout, "commit", "--quiet", "--allow-empty", "-m", "mine")
    assert "v1.10 is in what is here" in run(checkout)
    assert len(list(checkout.glob(".env.before-*"))) == 1


def test_a_branch_is_the_remotes_and_not_what_was_fetched_long_ago(checkout: Path) -> None:
    assert "at main" in run(checkout, "main")
    assert git(checkout, "describe", "--tags").strip() == "v1.10"


def test_a_pre_release_is_taken_only_when_it_is_named(checkout: Path) -> None:
    upstream = checkout.parent / "upstream"
    for tag in ("v1.11-rc1", "weekly"):
        git(upstream, "commit", "--quiet", "--allow-empty", "-m", tag)
        git(upstream, "tag", tag)
    assert "at v1.10" in run(checkout)
    assert "at v1.11-rc1" in run(checkout, "v1.11-rc1")


def test_commits_of_the_users_own_are_told_before_anything_is_changed(checkout: Path) -> None:
    (checkout / "compose.yaml").write_text(render(COMPOSE, 4))
    git(checkout, "commit", "--quiet", "--allow-empty", "-m", "mine")
    with pytest.raises(UserError, match=r"has commits that 'v1\.10' has not; `git rebase v1\.10`"):
        run(checkout)
    assert (checkout / "compose.yaml").read_text() == render(COMPOSE, 4)
    assert not list(checkout.glob(".env.before-*"))


def test_a_file_in_the_way_of_a_new_one_is_named_and_the_rest_is_as_it_was(checkout: Path) -> None:
    upstream = checkout.parent / "upstream"
    (upstream / "mine.yaml").write_text("theirs")
    git(upstream, "add", ".")
    git(upstream, "commit", "--quiet", "-m", "a new file")
    git(upstream, "tag", "v1.11")
    (checkout / "mine.yaml").write_text("mine")
    (checkout / "compose.yaml").write_text(render(COMPOSE, 4))
    with pytest.raises(UserError, match=r"would be overwritten by merge: mine\.yaml"):
        run(checkout)
    assert (checkout / "mine.yaml").read_text() == "mine"
    assert (checkout / "compose.yaml").read_text() == render(COMPOSE, 4)
    assert git(checkout, "describe", "--tags").strip() == "v1.0"
    assert (checkout / ".env").read_text() == MINE


def test_a_version_that_cannot_be_rendered_for_as_many_cards_changes_nothing(checkout: Path) -> None:
    commit(checkout.parent / "upstream", "v2.0", "MODEL_DIR=\n", "3.0", "services: {}\n")
    (checkout / "compose.yaml").write_text(render(COMPOSE, 4))
    with pytest.raises(UserError, match="no services named sglang-0"):
        run(checkout)
    assert (checkout / "compose.yaml").read_text() == render(COMPOSE, 4)
    assert git(checkout, "describe", "--tags").strip() == "v1.0"


def test_a_checkout_without_a_remote_or_without_git_says_so(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(checkout, "remote", "remove", "origin")
    with pytest.raises(UserError, match="has no remote to upgrade from; git remote add origin"):
        run(checkout)
    with pytest.raises(UserError, match="is no checkout of this project"):
        upgrade(checkout.parent, checkout / ".env", None, False, Console())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="there is no command `git`"):
        run(checkout)


def test_a_detached_checkout_goes_both_ways(checkout: Path) -> None:
    git(checkout, "checkout", "--quiet", "--detach", "v1.0")
    run(checkout, "v1.10")
    assert git(checkout, "describe", "--tags").strip() == "v1.10"
    run(checkout, "v1.9")
    assert git(checkout, "describe", "--tags").strip() == "v1.9"
