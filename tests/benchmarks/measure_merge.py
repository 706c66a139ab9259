"""One way of merging, measured in this process: WAY CORPUS RUN OUTPUT, of ours, verified or concatenate."""

import logging
import sys
from pathlib import Path
from typing import Any

import structlog

from services.runs import Run, read_settings
from tests.benchmarks.measured import measured_here, tell


def ours(corpus: Path, run: Path, output: Path, verify: bool) -> Any:
    from services.tokenizer.merge import merge_runs

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    opened = Run(run)
    settings = read_settings(opened)
    account = measured_here(lambda: merge_runs([opened], corpus, output, settings, verify))
    return account._replace(result=account.result["after"])


def concatenate(corpus: Path, run: Path, output: Path) -> Any:
    """What the peers do: concatenate two datasets and save."""
    import datasets

    datasets.disable_progress_bars()

    def merge() -> int:
        base = datasets.load_from_disk(str(corpus))
        new = datasets.load_from_disk(str(run / "as_dataset"))
        joined = datasets.concatenate_datasets([base, new])
        joined.save_to_disk(str(output))
        return len(joined)

    return measured_here(merge)


def read(corpus: Path) -> Any:
    from services.dataset_folder import open_dataset
    from services.sample_rows import read_totals

    shards = open_dataset(corpus).shards
    measured = measured_here(lambda: read_totals(shards))
    return measured._replace(result=measured.result.as_json())


def main() -> None:
    way, corpus, run, output = sys.argv[1], *map(Path, sys.argv[2:5])
    if way == "concatenate":
        tell(concatenate(corpus, run, output))
    elif way == "read":
        tell(read(corpus))
    else:
        tell(ours(corpus, run, output, verify=way == "verified"))


if __name__ == "__main__":
    main()
