"""The job of the queue `prepare`."""

from services.chat import load_tokenizer
from services.prompts.prepare import prepare_run
from services.runs import open_run, read_settings
from services.settings import Addresses


def prepare(run_name: str) -> None:
    """Make the run's prompts. Safe to run twice: what is published stays."""
    run = open_run(Addresses().runs, run_name)
    settings = read_settings(run)
    prepare_run(run, settings, load_tokenizer(settings.target.path))
