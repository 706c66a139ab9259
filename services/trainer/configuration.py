"""From a run's settings to dflash's configuration: the same keys, with the run's paths put in."""

import json
from collections.abc import Iterator
from pathlib import Path

from dflash.config import EvaluationConfig, TrainingConfig
from services.errors import UserError
from services.records import read_prompts
from services.runs import Run
from services.settings import Settings


def training_config(run: Run, settings: Settings) -> TrainingConfig:
    values = settings.train.model_dump(exclude={"job_timeout"})
    return TrainingConfig(**values, target=settings.target.path, dataset=run.dataset, output=run.training)


def evaluation_config(run: Run, settings: Settings, name: str, step: int, prompts: Path) -> EvaluationConfig:
    """How the checkpoint of `step` is measured; what the target alone answers is shared by all evaluations."""
    return EvaluationConfig(
        **settings.evaluate.model_dump(exclude={"job_timeout"}),
        target=settings.target.path,
        draft=run.checkpoint(step) / "draft",
        prompts=prompts,
        report=run.evaluation(name),
        rollouts=run.root / "evaluation" / "rollouts.jsonl",
    )


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
            content = {"prompt_id": prompt.prompt_id, "source": prompt.source, "input_ids": prompt.input_ids}
            yield json.dumps(content) + "\n"
