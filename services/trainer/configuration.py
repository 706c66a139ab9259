"""From a run's settings to dflash's configuration: the same keys, with the run's paths put in."""

import json
from collections.abc import Iterator
from pathlib import Path

from dflash.config import TrainingConfig
from services.errors import UserError
from services.files import read_json
from services.records import read_prompts
from services.runs import Run
from services.settings import Settings


def training_config(run: Run, settings: Settings, held_out: Path) -> TrainingConfig:
    """What `dflash train` gets; `held_out` is the file of held-out prompts, to be there if acceptance is measured."""
    values = settings.train.model_dump(exclude={"job_timeout", "dataset"})
    if settings.train.acceptance is not None:
        values["acceptance"]["prompts"] = held_out
    return TrainingConfig(
        **values, target=settings.target.path, dataset=training_dataset(run, settings), output=run.training
    )


def training_dataset(run: Run, settings: Settings) -> Path:
    """The dataset to train on: the one that the settings name, else the run's own.

    Raises:
        UserError: a merge made it with another tokenizer than the run's.
    """
    dataset = settings.train.dataset
    if dataset is None:
        return run.dataset
    record, rendering = dataset / run.merged.name, read_json(run.record).get("rendering")
    if rendering and record.is_file() and read_json(record)["tokenizer"] != rendering["tokenizer"]:
        raise UserError(
            f"train.dataset {dataset}: merged for another tokenizer than run {run.name}'s; name another dataset"
        )
    return dataset


def evaluation_arguments(run: Run, settings: Settings, name: str, draft: Path, prompts: Path) -> list[str]:
    """Options of `dflash evaluate` for a drafter; all evaluations share the target's own answers."""
    options = {
        "target": settings.target.path,
        "draft": draft,
        "prompts": prompts,
        "dataset": training_dataset(run, settings),
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
