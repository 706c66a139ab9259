"""From a run's settings to dflash's configuration: the same keys, with the run's paths put in."""

import json
from collections.abc import Iterator
from pathlib import Path

from dflash.config import TrainingConfig
from services.errors import UserError
from services.records import read_prompts
from services.runs import Run
from services.settings import Settings


def training_config(run: Run, settings: Settings, held_out: Path) -> TrainingConfig:
    """What `dflash train` gets; `held_out` is the file of held-out prompts, to be there if acceptance is measured."""
    values = settings.train.model_dump(exclude={"job_timeout"})
    if settings.train.acceptance is not None:
        values["acceptance"]["prompts"] = held_out
    return TrainingConfig(**values, target=settings.target.path, dataset=run.dataset, output=run.training)


def evaluation_arguments(run: Run, settings: Settings, name: str, step: int, prompts: Path) -> list[str]:
    """Options of `dflash evaluate` for the checkpoint of `step`; all evaluations share the target's own answers."""
    options = {
        "target": settings.target.path,
        "draft": run.checkpoint(step),
        "prompts": prompts,
        "dataset": run.dataset,
        "report": run.evaluation(name),
        "rollouts": prompts.with_name("rollouts.jsonl"),
        "max-new-tokens": settings.evaluate.max_new_tokens,
        "batch-size": settings.evaluate.batch_size,
        "dtype": settings.evaluate.dtype,
        "device": settings.evaluate.device,
    }
    if settings.evaluate.threads is not None:
        options["threads"] = settings.evaluate.threads
    return [part for option, value in options.items() for part in (f"--{option}", str(value))]


def held_out_lines(run: Run, settings: Settings) -> Iterator[str]:
    """The held-out prompts of every source, a JSON object a line.

    Raises:
        UserError: no source keeps prompts apart.
    """
    paths = [run.held_out(source.name) for source in settings.sources if source.held_out]
    if not paths:
        raise UserError(f"run {run.name} has no held-out prompts; set held_out for a source and prepare a new run")
    for path in paths:
        for prompt in read_prompts(path):
            content = {
                "prompt_id": prompt.prompt_id,
                "source": prompt.source,
                "input_ids": prompt.input_ids,
                "thinking": settings.render.thinking,
            }
            yield json.dumps(content) + "\n"
