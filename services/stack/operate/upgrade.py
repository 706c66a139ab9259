"""Taking a user's checkout to another version: their .env stays, and what changed is told."""

import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from services.errors import UserError
from services.files import replace_text
from services.stack.operate.env_file import ASSIGNED, OFFERED, read_variables, write_lines
from services.stack.render import render

COMPOSE = "compose.yaml"
EXAMPLE = ".env.example"
VERSIONS = "images/versions.toml"
VERSION = re.compile(r"v?\d+(\.\d+)*")


def upgrade(folder: Path, env_file: Path, reference: str | None, dry_run: bool, console: Console) -> None:
    """Take the checkout to a tag, branch or commit (by default the newest tag that is a version).

    A compose.yaml that was rendered for another number of cards is rendered again from the new one.

    Raises:
        UserError: the checkout has changes of the user's own, or does not lead to that version. Nothing was changed.
    """
    target, new = _fetched(folder, reference)
    old = _commit(folder, "HEAD")
    cards = _rendered_cards(folder)
    changed = [path for path in _changed(folder) if not (path == COMPOSE and cards)]
    if changed:
        raise UserError(f"{', '.join(changed)}: changed here; commit or `git stash` that, then upgrade")
    if old == new or (reference is None and _leads(folder, new, old)):
        console.print(f"{target} is {'what is here' if old == new else 'in what is here'}")
        return
    _check_way(folder, old, new, target)
    rendered = render(_show(folder, new, COMPOSE), cards) if cards else None
    for line in changes(folder, old, new):
        console.print(line, markup=False)
    variables = read_variables(env_file)
    added = {
        name: text
        for name, text in _offers(_show(folder, new, EXAMPLE)).items()
        if name not in variables and name not in _offers(_show(folder, old, EXAMPLE))
    }
    if dry_run:
        console.print("nothing was changed (--dry-run)")
        return
    _move(folder, new, rendered)
    kept = env_file.with_name(f"{env_file.name}.before-{new[:8]}")
    shutil.copy2(env_file, kept)
    if added:
        lines = env_file.read_text(encoding="utf-8").splitlines()
        write_lines(env_file, [*lines, "", f"# New with {target}, see .env.example:", *added.values()])
    again = f", {COMPOSE} is rendered for {cards} cards again" if cards else ""
    console.print(f"at {target}; .env as it was but for {len(added)} new lines (before: {kept.name}){again}")
    console.print("next: make envs build, dflash-stack doctor, make up")


def changes(folder: Path, old: str, new: str) -> list[str]:
    """What a user has to know of what lies between two commits."""
    count = _git(folder, "rev-list", "--count", f"{old}..{new}").strip()
    lines = [f"{old[:8]} -> {new[:8]}, {count} commits"]
    before, after = (_offers(_show(folder, commit, EXAMPLE)) for commit in (old, new))
    lines += [f".env: new {after[name]}" for name in after if name not in before]
    lines += [f".env: {name} is not read any more" for name in before if name not in after]
    lines += [
        f".env: default {before[name]} -> {after[name]}"
        for name in after
        if name in before and before[name] != after[name]
    ]
    versions = [_versions(_show(folder, commit, VERSIONS)) for commit in (old, new)]
    lines += [
        f"{name}: {versions[0].get(name, 'none')} -> {versions[1].get(name, 'none')}"
        for name in sorted(versions[0].keys() | versions[1].keys())
        if versions[0].get(name) != versions[1].get(name)
    ]
    return lines


def _offers(example: str) -> dict[str, str]:
    """The lines of an .env.example that set a variable or offer one, by name."""
    matches = ((ASSIGNED.match(line) or OFFERED.match(line), line) for line in example.splitlines())
    return {match[1]: line for match, line in matches if match}


def _versions(text: str) -> Mapping[str, str]:
    tables = tomllib.loads(text)
    return {
        f"{image}.{variant} {name}": str(version)
        for image, variants in tables.items()
        for variant, content in variants.items()
        for name, version in content.items()
    }


def _rendered_cards(folder: Path) -> int:
    """For how many cards compose.yaml was rendered here, 0 if it is the committed one or another's work."""
    path = folder / COMPOSE
    text, committed = path.read_text(encoding="utf-8"), _show(folder, "HEAD", COMPOSE)
    cards = len(re.findall(r"^  sglang-\d+:$", text, re.MULTILINE))
    return cards if cards and text != committed and render(committed, cards) == text else 0


def _changed(folder: Path) -> list[str]:
    lines = _git(folder, "status", "--porcelain", "--untracked-files=no").splitlines()
    return [line[3:] for line in lines]


def _fetched(folder: Path, reference: str | None) -> tuple[str, str]:
    """What the remote has of a version by now: its name and its commit."""
    try:
        _git(folder, "rev-parse", "--show-toplevel")
    except UserError as error:
        said = f"{folder.absolute()} is no checkout of this project ({error}); give it with --folder"
        raise UserError(said) from error
    remotes = _git(folder, "remote").split()
    if not remotes:
        raise UserError("this checkout has no remote to upgrade from; git remote add origin ADDRESS")
    remote = "origin" if "origin" in remotes else remotes[0]
    _git(folder, "fetch", "--tags", "--quiet", remote)
    target = reference or _newest_version(folder)
    # A branch of this name here is as old as the last upgrade.
    at_remote = f"refs/remotes/{remote}/{target}"
    return target, _commit(folder, at_remote if _git(folder, "for-each-ref", at_remote) else target)


def _newest_version(folder: Path) -> str:
    """The newest tag such as v1.10; pre-releases and other tags are taken when they are named."""
    tags = _git(folder, "tag", "--list", "--sort=-version:refname").split()
    versions = [tag for tag in tags if VERSION.fullmatch(tag)]
    if not versions:
        raise UserError(
            "the checkout's remote has no version tags; name a branch or a commit: dflash-stack upgrade main"
        )
    return versions[0]


def _check_way(folder: Path, old: str, new: str, target: str) -> None:
    """Raises UserError where going to `new` would not arrive there, or would leave commits of the user's behind."""
    if _on_branch(folder) and _leads(folder, new, old):
        raise UserError(f"{target!r} is older than what is here; `git checkout {target}` goes back to it")
    kept = _git(folder, "for-each-ref", "--count=1", "--contains", old, "refs/tags", "refs/remotes")
    if not (_leads(folder, old, new) or (kept and not _on_branch(folder))):
        raise UserError(f"this checkout has commits that {target!r} has not; `git rebase {target}` takes them along")


def _move(folder: Path, new: str, rendered: str | None) -> None:
    """Check `new` out, with `rendered` in place of its compose.yaml if given; where that fails all is as it was."""
    mine = (folder / COMPOSE).read_text(encoding="utf-8")
    if rendered is not None:
        _git(folder, "checkout", "--quiet", "--", COMPOSE)
    try:
        if _on_branch(folder):
            _git(folder, "merge", "--quiet", "--ff-only", new)
        else:
            _git(folder, "checkout", "--quiet", "--detach", new)
    except BaseException:
        if rendered is not None:
            replace_text(folder / COMPOSE, mine)
        raise
    if rendered is not None:
        replace_text(folder / COMPOSE, rendered)


def _on_branch(folder: Path) -> bool:
    return _git(folder, "rev-parse", "--abbrev-ref", "HEAD").strip() != "HEAD"


def _leads(folder: Path, older: str, newer: str) -> bool:
    """Whether `newer` has all commits of `older`."""
    return not _git(folder, "rev-list", "--max-count=1", older, f"^{newer}").strip()


def _commit(folder: Path, reference: str) -> str:
    try:
        return _git(folder, "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}").strip()
    except UserError as error:
        raise UserError(f"there is no version {reference!r} here or at the remote; `git tag` lists them") from error


def _show(folder: Path, commit: str, path: str) -> str:
    return _git(folder, "show", f"{commit}:{path}")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError("there is no command `git`; install it") from error
    if finished.returncode != 0:
        # What git names stands between its first line and its last one.
        lines = [line.strip() for line in finished.stderr.splitlines() if not line.startswith("hint:")]
        said = " ".join(lines) or f"status {finished.returncode}"
        raise UserError(f"git {arguments[0]}: {said}; see `git -C {folder} status`")
    return finished.stdout
