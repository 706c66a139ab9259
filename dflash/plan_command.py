"""`dflash plan`: what a run needs of each card, before it is begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dflash.config import TopologyConfig, TrainingConfig, role_of
from dflash.config_file import load_config
from dflash.errors import DflashError


def plan(
    config: Annotated[Path, typer.Option(help="The run's configuration; of its target only config.json is read.")],
    card_bytes: Annotated[int | None, typer.Option(help="Memory of a card; default: memory.limit_bytes.")] = None,
    baseline_bytes: Annotated[
        int | None, typer.Option(help="Held by a process before it loads anything; default: memory.baseline_bytes.")
    ] = None,
    roles: Annotated[
        str | None, typer.Option(help="Comma-separated: target, drafter, colocated; default: those of topology.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what each part of a process needs, and the largest token_budget that fits; exit code 1 if one does not."""
    from dflash.limits import draft_rows
    from dflash.plan import ROLES, as_table, cards_of_role, make_plan, read_target_shape, refusal

    settings = load_config(config, TrainingConfig)
    limit = card_bytes or settings.memory.limit_bytes
    if limit is None:
        raise DflashError("how large is a card? Give --card-bytes, or memory.limit_bytes in the configuration")
    named = roles.split(",") if roles else roles_in(settings.topology)
    wanted = [role for role in ROLES if role in named]
    if unknown := set(named) - set(ROLES):
        raise DflashError(f"--roles {roles}: {min(unknown)!r} is none of {', '.join(ROLES)}")
    baseline = settings.memory.baseline_bytes if baseline_bytes is None else baseline_bytes
    target = read_target_shape(settings.target)
    plans = [
        make_plan(role, settings, target, limit, baseline, card)
        for role in wanted
        for card in range(cards_of_role(role, settings))
    ]
    if as_json:
        lines = [
            {"role": p.role, "card": p.card, "parts": p.parts, "total": p.total, "limit": p.limit, "fits": p.fits}
            | {"largest_token_budget": p.largest_token_budget, "largest_draft_rows": p.largest_draft_rows}
            for p in plans
        ]
        typer.echo(json.dumps(lines, indent=2))
    else:
        typer.echo(as_table(plans))
        typer.echo(f"draft rows of a step: {draft_rows(settings)}")
        for one in plans:
            typer.echo(f"{one.name}: {'fits' if one.fits else refusal(one, settings)}")
    if not all(one.fits for one in plans):
        raise typer.Exit(1)


def roles_in(topology: TopologyConfig) -> list[str]:
    """Return what the processes of a run do, each kind once."""
    return sorted({role_of(rank, topology.targets, topology.drafters) for rank in range(topology.processes)})
