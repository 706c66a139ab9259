"""The queues, one a stage, and where the jobs of each live."""

from typing import Literal

Stage = Literal["prepare", "generate", "assemble", "merge", "train"]

# Whoever enqueues a job needs none of its module's imports.
JOB_MODULES: dict[Stage, str] = {
    "prepare": "services.prompts.jobs",
    "generate": "services.producer.jobs",
    "assemble": "services.tokenizer.jobs",
    "merge": "services.tokenizer.jobs",
    "train": "services.trainer.jobs",
}
