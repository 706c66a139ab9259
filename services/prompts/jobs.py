"""The jobs of the queue `prepare`."""

from services.chat import load_tokenizer
from services.files import publish_json
from services.prompts.prepare import prepare_run
from services.records import read_prompts
from services.runs import open_run, read_settings
from services.settings import Addresses


def prepare(run_name: str) -> None:
    """Make the run's prompts. Safe to run twice: what is published stays."""
    run = open_run(Addresses().runs, run_name)
    settings = read_settings(run)
    prepare_run(run, settings, load_tokenizer(settings.target.path))


def preview(run_name: str, count: str) -> None:
    """Show the first prompts of every source as the target gets them, decoded from their token ids."""
    run = open_run(Addresses().runs, run_name)
    settings = read_settings(run)
    tokenizer = load_tokenizer(settings.target.path)
    texts = {
        source.name: [
            str(tokenizer.decode(prompt.input_ids))
            for prompt in read_prompts(run.prompts(source.name), count=int(count))
        ]
        for source in settings.sources
    }
    publish_json(run.preview(int(count)), texts)
