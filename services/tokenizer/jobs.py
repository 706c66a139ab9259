"""The jobs of the queues `assemble` and `merge`."""

from pathlib import Path

from services.runs import open_run, read_settings
from services.settings import Addresses
from services.tokenizer.assemble import assemble_chunk
from services.tokenizer.merge import merge_run, merge_runs


def assemble(run_name: str, chunk: str) -> None:
    """Make the samples of one chunk. Safe to run twice: what is published stays."""
    run = open_run(Addresses().runs, run_name)
    assemble_chunk(run, read_settings(run), chunk)


def merge(run_name: str) -> None:
    """Make the run's dataset. Safe to run twice: what is published stays."""
    run = open_run(Addresses().runs, run_name)
    merge_run(run, read_settings(run))


def merge_into(dataset: str, base: str, verify: str, *run_names: str) -> None:
    """Make a dataset of a base (empty: of none) and runs. Safe to run twice: what is published stays.

    What is left out is as the first run's settings say; `verify` is "verify" or empty.
    """
    runs = [open_run(Addresses().runs, name) for name in run_names]
    merge_runs(runs, Path(base) if base else None, Path(dataset), read_settings(runs[0]), verify == "verify")
