"""The ranks of a run as processes of a test, forked from one that has imported everything already."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from dflash.config import TrainingConfig

SECONDS = 300.0


def run_ranks(config: TrainingConfig, folder: Path, stop_after: int | None = None) -> None:
    """Run every rank of `config` until it ends; `folder` is for their meeting point."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "dflash.train", "dflash.target_rank"])
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (config.model_dump_json(), str(folder / f"{config.output.name}.ranks"), stop_after)
    processes = [
        context.Process(target=_take_part, args=(rank, *arguments)) for rank in range(config.topology.processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    left = [process for process in processes if process.is_alive()]
    for process in left:
        process.kill()
    assert not left
    assert [process.exitcode for process in processes] == [0] * len(processes)


def _take_part(rank: int, config_json: str, meeting_point: str, stop_after: int | None) -> None:
    import torch

    from dflash.parts import Clock
    from dflash.target_rank import serve_states
    from dflash.train import train
    from dflash.world import join, leave

    torch.set_num_threads(1)
    config = TrainingConfig.model_validate_json(config_json)
    world = join(rank, config.topology, Path(meeting_point), config.device)
    if world.role == "target":
        serve_states(config, world, Clock())
    else:
        steps = 0

        def should_stop() -> bool:
            nonlocal steps
            steps += 1
            # One rank alone is asked, as when a signal reaches one before the other.
            return steps == stop_after and rank == world.drafters - 1

        train(config, should_stop=should_stop, world=world)
    leave()
