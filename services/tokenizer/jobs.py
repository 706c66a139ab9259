"""The jobs of the queues `assemble` and `merge`."""

from services.runs import open_run, read_settings
from services.settings import Addresses
from services.tokenizer.assemble import assemble_chunk
from services.tokenizer.merge import merge_run


def assemble(run_name: str, chunk: str) -> None:
    """Make the samples of one chunk. Safe to run twice: what is published stays."""
    run = open_run(Addresses().runs, run_name)
    assemble_chunk(run, read_settings(run), chunk)


def merge(run_name: str) -> None:
    """Make the run's dataset. Safe to run twice: what is published stays."""
    run = open_run(Addresses().runs, run_name)
    merge_run(run, read_settings(run))
