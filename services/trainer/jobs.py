"""The jobs of the queue `train`; each changes nothing when its result is there already."""

from functools import partial
from pathlib import Path

from services.errors import UserError
from services.files import publish, replace_json
from services.runs import Run, check_tokenizer, open_run, read_settings
from services.settings import Addresses, Settings
from services.trainer.configuration import evaluation_arguments, held_out_lines, training_config
from services.trainer.supervise import run_dflash


def train(run_name: str) -> None:
    """Train to the configured step, from the newest checkpoint if there is one."""
    run, settings = _open(run_name)
    if run.checkpoint(settings.train.steps).is_dir():
        return
    if settings.train.acceptance is not None:
        _publish_held_out(run, settings)
    config = run.training / "training.json"
    replace_json(config, training_config(run, settings, _held_out(run)).model_dump(mode="json"))
    run_dflash(run.training / "train.log", "train", "--config", config)


def evaluate(run_name: str, which: str) -> None:
    """Measure acceptance of the untrained drafter (`before`) or of the trained one (`after`).

    That is the best checkpoint where acceptance was measured while training, else the last.
    """
    run, settings = _open(run_name)
    if run.evaluation(which).is_file():
        return
    _check_trained(run, 0 if which == "before" else settings.train.steps)
    draft = run.checkpoint(0) if which == "before" else run.training
    _publish_held_out(run, settings)
    arguments = evaluation_arguments(run, settings, which, draft, _held_out(run))
    run_dflash(run.root / "evaluation" / f"{which}.log", "evaluate", *arguments)


def export(run_name: str) -> None:
    """Publish the trained drafter (the best checkpoint where acceptance was measured) as SGLang loads it."""
    run, settings = _open(run_name)
    if run.export.is_dir():
        return
    _check_trained(run, settings.train.steps)
    run_dflash(run.training / "export.log", "export", run.training, run.export, "--target", settings.target.path)


def _open(run_name: str) -> tuple[Run, Settings]:
    run = open_run(Addresses().runs, run_name)
    settings = read_settings(run)
    check_tokenizer(run, settings.target.path)
    return run, settings


def _held_out(run: Run) -> Path:
    return run.root / "evaluation" / "held_out.jsonl"


def _publish_held_out(run: Run, settings: Settings) -> None:
    lines = "".join(held_out_lines(run, settings))
    publish(_held_out(run), partial(_write_text, lines))


def _check_trained(run: Run, step: int) -> None:
    if not run.checkpoint(step).is_dir():
        raise UserError(f"run {run.name} has no checkpoint of step {step}; first `dflash-stack train {run.name}`")


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
