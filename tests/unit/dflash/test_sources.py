"""Mixing weights and the replay share decide what an epoch takes; every sample has its turn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset as HubDataset

from dflash.config import MixtureConfig
from dflash.data import Dataset, open_dataset
from dflash.errors import DflashError
from dflash.sources import SourceRows, epoch_rows, mix, read_sources
from tests.unit.dflash.conftest import random_rows


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Two shards of an old corpus without provenance and one of two sources, 20 rows each."""
    folder = tmp_path / "data"
    HubDataset.from_list(random_rows(60)).save_to_disk(str(folder), num_shards=3)
    (folder / "provenance").mkdir()
    names = ["math"] * 15 + ["chat"] * 5
    shard = sorted(folder.glob("*.arrow"))[2]
    pq.write_table(pa.table({"source": names}), folder / "provenance" / f"{shard.stem}.parquet")
    return open_dataset(folder)


def mixed(dataset: Dataset, **settings: object) -> list[SourceRows]:
    config = MixtureConfig.model_validate(settings)
    return mix(dataset, np.arange(len(dataset)), dataset.lengths, config)


def test_sources_are_read_by_shard(dataset: Dataset) -> None:
    names, indexes = read_sources(dataset)
    assert Counter(names[index] for index in indexes) == {"existing": 40, "math": 15, "chat": 5}
    assert {names[index] for index in indexes[:40]} == {"existing"}


def test_without_a_mixture_an_epoch_takes_every_row_once(dataset: Dataset) -> None:
    assert sorted(epoch_rows(mixed(dataset), 0, 3)) == list(range(60))


def test_weights_decide_how_often_a_source_is_taken(dataset: Dataset) -> None:
    sources = mixed(dataset, weights={"existing": 0.25, "math": 2, "chat": 0})
    counts = [Counter(row // 20 for row in epoch_rows(sources, 0, epoch)) for epoch in range(4)]
    assert all(count[0] + count[1] == 10 and count[2] == 30 for count in counts)
    seen = Counter(row for epoch in range(4) for row in epoch_rows(sources, 0, epoch) if row < 40)
    assert seen == dict.fromkeys(range(40), 1), "a quarter an epoch: after four, every row once"


def test_the_replay_share_is_of_tokens(dataset: Dataset) -> None:
    sources = mixed(dataset, replay_share=0.3)
    old = new = 0
    for epoch in range(20):
        rows = epoch_rows(sources, 0, epoch)
        old += int(dataset.lengths[rows[rows < 40]].sum())
        new += int(dataset.lengths[rows[rows >= 40]].sum())
    assert old / (old + new) == pytest.approx(0.3, abs=0.02)


def test_an_unknown_source_is_named(dataset: Dataset) -> None:
    with pytest.raises(DflashError, match=r"no source maths; it has chat, existing, math"):
        mixed(dataset, weights={"maths": 2})


def test_provenance_of_another_length_is_refused(dataset: Dataset) -> None:
    path = next((dataset.path / "provenance").iterdir())
    pq.write_table(pa.table({"source": ["math"]}), path)
    with pytest.raises(DflashError, match=r"has 1 rows, but its shard .* has 20"):
        mixed(dataset, replay_share=0.5)
