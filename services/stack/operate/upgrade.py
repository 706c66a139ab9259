"""Taking a user's checkout to another version: their .env stays, and what changed is told."""

import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from services.errors import UserError
from services.runs import replace_text
from services.stack.operate.engine import last_line
from services.stack.operate.env_file import ASSIGNED, OFFERED, read_variables, write_lines
from services.stack.render import render

COMPOSE = "compose.yaml"
EXAMPLE = ".env.example"
VERSIONS = "images/versions.toml"


def upgrade(folder: Path, env_file: Path, reference: str | None, dry_run: bool, console: Console) -> None:
    """Take the checkout to a tag, branch or commit (by default the newest tag of its remote).

    A compose.yaml that was rendered for another number of cards is rendered again from the new one.

    Raises:
        UserError: the checkout has changes of the user's own, or does not lead to that version. Nothing was changed.
    """
    _git(folder, "rev-parse", "--show-toplevel")
    _git(folder, "fetch", "--tags", "--quiet")
    target = reference or _newest_tag(folder)
    old, new = _commit(folder, "HEAD"), _commit(folder, target)
    cards = _rendered_cards(folder)
    changed = [path for path in _changed(folder) if not (path == COMPOSE and cards)]
    if changed:
        raise UserError(f"{', '.join(changed)}: changed here; commit or `git stash` that, then upgrade")
    if old == new:
        console.print(f"{target} is what is here")
        return
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
    kept = env_file.with_name(f"{env_file.name}.before-{new[:8]}")
    shutil.copy2(env_file, kept)
    if cards:
        _git(folder, "checkout", "--quiet", "--", COMPOSE)
    try:
        _move(folder, target)
    finally:
        if cards:
            replace_text(folder / COMPOSE, render((folder / COMPOSE).read_text(encoding="utf-8"), cards))
    if added:
        lines = env_file.read_text(encoding="utf-8").splitlines()
        write_lines(env_file, [*lines, "", f"# New with {target}, see .env.example:", *added.values()])
    again = f", {COMPOSE} is rendered for {cards} cards again" if cards else ""
    console.print(f"at {target}; .env as it was but for {len(added)} new lines (before: {kept.name}){again}")
    console.print("next: make build, dflash-stack doctor, make up")


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


def _newest_tag(folder: Path) -> str:
    tags = _git(folder, "tag", "--list", "--sort=-version:refname").split()
    if not tags:
        raise UserError(
            "the checkout's remote has no tags; name a branch or a commit: dflash-stack upgrade origin/main"
        )
    return tags[0]


def _move(folder: Path, target: str) -> None:
    on_branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD").strip() != "HEAD"
    if on_branch:
        _git(folder, "merge", "--quiet", "--ff-only", target)
    else:
        _git(folder, "checkout", "--quiet", "--detach", target)


def _commit(folder: Path, reference: str) -> str:
    try:
        return _git(folder, "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}").strip()
    except UserError as error:
        raise UserError(f"there is no version {reference!r} here or at the remote; `git tag` lists them") from error


def _show(folder: Path, commit: str, path: str) -> str:
    return _git(folder, "show", f"{commit}:{path}")


def _git(folder: Path, *arguments: str) -> str:
    finished = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        said = last_line(finished.stderr) or finished.returncode
        raise UserError(f"git {arguments[0]}: {said}; see `git -C {folder} status`")
    return finished.stdout
