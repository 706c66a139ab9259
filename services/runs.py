"""A run's folder: which file means what, and how a run is begun and opened.

    RUNS/NAME/
      run.json                        the run's settings, and how its prompts are rendered
      prompts/SOURCE.parquet          prompts to generate for         (records.PROMPT_SCHEMA)
      prompts/SOURCE.json             what became of every row of the source
      prompts/prepare.json            the same for all sources; its presence ends the stage
      prompts/progress.json           how far preparing is
      prompts/preview-N.json          the first N prompts of every source as text
      held_out/SOURCE.parquet         prompts to measure acceptance on
      chunks.json                     which rows of which source make up which chunk
      journal/CHUNK.jsonl             answers of a chunk that is not finished
      completions/CHUNK.parquet       answers of a finished chunk     (records.COMPLETION_SCHEMA)
      completions/CHUNK.json          their counts, checksum and origin; its presence ends the chunk
      control.json                    whether generating is paused, and its budget
      samples/CHUNK.arrow             samples of a chunk              (records.SAMPLE_SCHEMA)
      samples/CHUNK.provenance.arrow  where each of them came from (records.PROVENANCE_SCHEMA)
      samples/CHUNK.json              what became of the chunk's completions
      agreement.json                  how many samples from ids equal those from text, once it was compared
      dataset/                        the merged Hugging Face dataset, with merge.json
      train/                          checkpoints and metrics; metrics/rank-N.prom for Prometheus
      evaluation/NAME.json            acceptance of one checkpoint
      export/                         the drafter, as SGLang loads it

Files are the truth. Each is published once, whole, and the first writer wins; see services/files.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.errors import UserError
from services.files import publish_json, read_json, replace_json
from services.settings import Settings, check_settings
from services.target import tokenizer_fingerprint

RUN_NAME = re.compile(r"^[a-z0-9][a-z0-9_-]{0,63}$")
CHANGEABLE_SECTIONS = {"train", "evaluate"}


@dataclass(frozen=True)
class Run:
    """Paths of one run; nothing is read or made by having one."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def record(self) -> Path:
        return self.root / "run.json"

    @property
    def prepared(self) -> Path:
        return self.root / "prompts" / "prepare.json"

    @property
    def prepare_progress(self) -> Path:
        return self.root / "prompts" / "progress.json"

    def preview(self, count: int) -> Path:
        return self.root / "prompts" / f"preview-{count}.json"

    def prompts(self, source: str) -> Path:
        return self.root / "prompts" / f"{source}.parquet"

    def source_prepared(self, source: str) -> Path:
        return self.root / "prompts" / f"{source}.json"

    def held_out(self, source: str) -> Path:
        return self.root / "held_out" / f"{source}.parquet"

    @property
    def chunks(self) -> Path:
        return self.root / "chunks.json"

    def journal(self, chunk: str) -> Path:
        return self.root / "journal" / f"{chunk}.jsonl"

    def completions(self, chunk: str) -> Path:
        return self.root / "completions" / f"{chunk}.parquet"

    def summary(self, chunk: str) -> Path:
        return self.root / "completions" / f"{chunk}.json"

    @property
    def control(self) -> Path:
        return self.root / "control.json"

    def samples(self, chunk: str) -> Path:
        return self.root / "samples" / f"{chunk}.arrow"

    def provenance(self, chunk: str) -> Path:
        return self.root / "samples" / f"{chunk}.provenance.arrow"

    def assembled(self, chunk: str) -> Path:
        return self.root / "samples" / f"{chunk}.json"

    @property
    def agreement(self) -> Path:
        return self.root / "agreement.json"

    @property
    def dataset(self) -> Path:
        return self.root / "dataset"

    @property
    def merged(self) -> Path:
        return self.dataset / "merge.json"

    @property
    def training(self) -> Path:
        return self.root / "train"

    @property
    def training_metrics(self) -> Path:
        return self.training / "metrics.jsonl"

    @property
    def rank_metrics(self) -> Path:
        return self.training / "metrics"

    def checkpoint(self, step: int) -> Path:
        return self.training / "checkpoints" / f"step-{step:08d}"

    def evaluation(self, name: str) -> Path:
        return self.root / "evaluation" / f"{name}.json"

    def evaluation_journal(self, name: str) -> Path:
        return self.root / "evaluation" / f"{name}.journal.jsonl"

    @property
    def export(self) -> Path:
        return self.root / "export"


def create_run(runs: Path, name: str, settings: Settings) -> Run:
    """Make the run's folder and record its settings, or take an existing run up again.

    What the run's data depends on is fixed once it is begun. `train` and `evaluate` may change: the trainer
    itself refuses what does not fit its checkpoints.

    Raises:
        UserError: the name cannot be used, or the run was begun with other settings (each difference is named).
    """
    if not RUN_NAME.match(name):
        raise UserError(f"run name {name!r}: use up to 64 of a-z, 0-9, '-' and '_', beginning with a letter or digit")
    run = Run(runs / name)
    given = settings.model_dump(mode="json")
    if publish_json(run.record, {"settings": given}):
        return run
    recorded = read_settings(run).model_dump(mode="json")
    if differences := [
        difference
        for section in given.keys() - CHANGEABLE_SECTIONS
        for difference in _differences(recorded[section], given[section], section)
    ]:
        raise UserError(
            f"run {name} in {runs} was begun with other settings ({'; '.join(sorted(differences))}); "
            "choose another run name, or put the settings back"
        )
    if recorded != given:
        replace_json(run.record, {**read_json(run.record), "settings": given})
    return run


def open_run(runs: Path, name: str) -> Run:
    """Raises UserError when there is no such run."""
    run = Run(runs / name)
    if not RUN_NAME.match(name) or not run.record.is_file():
        known = sorted(path.parent.name for path in runs.glob("*/run.json"))
        there = f"there are: {', '.join(known)}" if known else "there is none yet; begin with `dflash-stack prepare`"
        raise UserError(f"no run {name!r} in {runs}; {there}")
    return run


def read_settings(run: Run) -> Settings:
    """The settings with which the run was begun. Raises UserError when its record is damaged."""
    try:
        settings = read_json(run.record)["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run.record} is damaged; put it back from a backup, or begin a new run") from error
    return check_settings(settings, where=f"{run.record}")


def record_rendering(run: Run, rendering: dict[str, Any]) -> None:
    """Record in run.json how the run's prompts are rendered (thinking, template, tokenizer), once.

    Raises:
        UserError: they were rendered otherwise so far; what differs is named.
    """
    record = read_json(run.record)
    if "rendering" not in record:
        replace_json(run.record, {**record, "rendering": rendering})
    elif differences := list(_differences(record["rendering"], rendering, "rendering")):
        raise UserError(
            f"run {run.name} was begun with another target ({'; '.join(differences)}); put that model back, or begin "
            "a new run"
        )


def check_tokenizer(run: Run, target: Path) -> None:
    """Refuse a target whose tokenizer is not the one that the run's prompts were rendered with, once they are.

    Raises:
        UserError: it is another one, or is not there.
    """
    rendering = read_json(run.record).get("rendering")
    if rendering is not None:
        check_same_tokenizer(run, target, rendering["tokenizer"])


def check_same_tokenizer(run: Run, target: Path, recorded: str) -> None:
    """Raises UserError unless the target's tokenizer has the fingerprint that the run recorded."""
    if tokenizer_fingerprint(target) != recorded:
        raise UserError(
            f"target model {target}: its tokenizer is not the one that run {run.name} was prepared with; "
            "put that model back, or begin a new run"
        )


def _differences(recorded: Any, given: Any, key: str) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(given, dict):
        for name in sorted(recorded.keys() | given.keys()):
            yield from _differences(recorded.get(name), given.get(name), f"{key}.{name}")
    elif recorded != given:
        yield f"{key} was {recorded!r}, is {given!r}"
