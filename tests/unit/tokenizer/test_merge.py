"""A merge links the existing corpus, adds what is new once, and its numbers are those of the dataset."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services import dataset_folder
from services.chunks import plan_chunks
from services.errors import UserError
from services.files import read_json
from services.records import PROVENANCE_SCHEMA, SAMPLE_SCHEMA
from services.runs import Run
from services.settings import Settings
from services.tokenizer import content_index
from services.tokenizer.assemble import assemble_chunk
from services.tokenizer.jobs import merge
from services.tokenizer.merge import merge_run, merge_runs, verify_dataset

Generated = Callable[..., tuple[Run, Settings]]
Answers = list[dict[str, Any]]

WIDE = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int64")),
        "loss_mask": datasets.Sequence(datasets.Value("int64")),
        "seq_len": datasets.Value("int64"),
    }
)


def row(input_ids: list[int], supervised: int) -> dict[str, Any]:
    mask = [0] * (len(input_ids) - supervised) + [1] * supervised
    return {"input_ids": input_ids, "loss_mask": mask, "seq_len": len(input_ids)}


BASE_ROWS = [row([40, 41, 42], 1), row([43, 44], 1), row([1, 2, 1, 7, 8], 2)]


def save(path: Path, rows: Answers, features: datasets.Features | None = WIDE, shards: int = 2) -> Path:
    datasets.Dataset.from_list(rows, features=features).save_to_disk(path, num_shards=shards)
    return path


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """An existing corpus as `datasets` writes it, whose last row the run generates again."""
    return save(tmp_path / "base", BASE_ROWS)


@pytest.fixture
def make_assembled(make_generated: Generated) -> Generated:
    def make(*answers: dict[str, Any], **options: Any) -> tuple[Run, Settings]:
        run, settings = make_generated(*answers, **options)
        for chunk in plan_chunks(run, settings):
            assemble_chunk(run, settings, chunk.chunk)
        return run, settings

    return make


def test_new_samples_follow_the_corpus_in_its_own_types(make_assembled: Generated, base: Path) -> None:
    run, settings = make_assembled({"output_ids": [7]}, {"output_ids": [9]}, base=base)
    merge_run(run, settings)
    merged = datasets.load_from_disk(str(run.dataset))
    assert merged.features == WIDE
    assert merged.to_list() == [*BASE_ROWS, row([1, 2, 0, 7], 1), row([1, 2, 1, 9], 1)]


def test_the_corpus_is_linked_and_not_written_to(make_assembled: Generated, base: Path) -> None:
    before = content(base)
    run, settings = make_assembled({}, base=base)
    merge_run(run, settings)
    assert content(base) == before
    for shard in ("00000", "00001"):
        assert (run.dataset / f"data-{shard}.arrow").samefile(base / f"data-{shard}-of-00002.arrow")
    assert read_json(run.merged)["base"]["how"] == "linked"


def refuse_hard_links_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two file systems."""
    link = os.link

    def refuse(source: Path, target: Path) -> None:
        if Path(source).parent == folder:
            raise OSError(18, "Invalid cross-device link")
        link(source, target)

    monkeypatch.setattr(os, "link", refuse)


def test_on_another_file_system_the_corpus_is_referred_to(
    make_assembled: Generated, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_hard_links_of(base, monkeypatch)
    run, settings = make_assembled({"output_ids": [7]}, base=base)
    merge_run(run, settings)
    assert read_json(run.merged)["base"]["how"] == "referenced"
    assert (run.dataset / "data-00000.arrow").readlink() == base / "data-00000-of-00002.arrow"
    assert datasets.load_from_disk(str(run.dataset)).to_list() == [*BASE_ROWS, row([1, 2, 0, 7], 1)]


def test_where_no_link_can_be_made_the_corpus_is_copied(
    make_assembled: Generated, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    refuse_hard_links_of(base, monkeypatch)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    run, settings = make_assembled({"output_ids": [7]}, base=base)
    merge_run(run, settings)
    assert read_json(run.merged)["base"]["how"] == "copied"
    assert datasets.load_from_disk(str(run.dataset)).to_list() == [*BASE_ROWS, row([1, 2, 0, 7], 1)]


def test_what_is_there_already_is_dropped_and_counted(make_assembled: Generated, base: Path) -> None:
    run, settings = make_assembled({}, {}, {}, base=base)
    # Prompt 1 with this answer is a row of the corpus; the last chunk repeats the first.
    extra = run.root / "extra"
    shutil.copy(run.samples("questions-00000"), extra)
    chunks = read_json(run.chunks)["chunks"]
    run.chunks.write_text(json.dumps({"chunks": [*chunks, {**chunks[0], "chunk": "questions-00001"}]}))
    shutil.copy(extra, run.samples("questions-00001"))
    shutil.copy(run.provenance("questions-00000"), run.provenance("questions-00001"))
    shutil.copy(run.assembled("questions-00000"), run.assembled("questions-00001"))

    account = merge_run(run, settings)
    assert account["assembled"] == 6
    assert account["dropped"] == {"in_base": 2, "duplicate": 2}
    assert account["sources"]["questions"]["samples"] == 2
    assert len(datasets.load_from_disk(str(run.dataset))) == len(BASE_ROWS) + 2


def test_the_account_is_that_of_the_dataset(make_assembled: Generated, base: Path) -> None:
    run, settings = make_assembled({"output_ids": [7]}, {"output_ids": [9] * 6}, {}, {}, base=base)
    account = merge_run(run, settings)
    merged = datasets.load_from_disk(str(run.dataset)).to_list()
    assert account == read_json(run.merged)
    assert account["after"] == {
        "samples": len(merged),
        "tokens": sum(len(sample["input_ids"]) for sample in merged),
        "supervised_tokens": sum(sum(sample["loss_mask"]) for sample in merged),
        "lengths": {"2": 1, "4": 2, "8": 3, "16": 1},
    }
    assert account["before"] == {
        "samples": 3,
        "tokens": 10,
        "supervised_tokens": 4,
        "lengths": {"2": 1, "4": 1, "8": 1},
    }
    for name in ("samples", "tokens", "supervised_tokens"):
        assert account["added"][name] == account["runs"]["run"][name]
        assert account["added"][name] == account["after"][name] - account["before"][name]
        assert account["domains"]["general"][name] == account["added"][name]
        assert account["domains"]["unknown"][name] == account["before"][name]
    assert set(account["sources"]) == {"existing", "questions"}
    assert sum(part["samples_percent"] for part in account["sources"].values()) == pytest.approx(100, abs=0.05)
    assert account["growth_percent"]["samples"] == pytest.approx(100 * 4 / 3, abs=0.01)


def test_near_empty_and_over_long_samples_are_left_out_and_counted(make_assembled: Generated, base: Path) -> None:
    answers: Answers = [{"output_ids": [7]}, {"output_ids": [8, 9]}, {"output_ids": [9] * 6}]
    run, settings = make_assembled(*answers, base=base, merge={"min_supervised_tokens": 2, "max_length": 8})
    account = merge_run(run, settings)
    assert account["dropped"] == {"near_empty": 1, "over_long": 1}
    assert account["assembled"] == account["added"]["samples"] + 2
    assert datasets.load_from_disk(str(run.dataset)).to_list() == [*BASE_ROWS, row([1, 2, 1, 8, 9], 2)]


def test_a_merge_of_which_nothing_would_be_left_is_refused(make_assembled: Generated) -> None:
    run, settings = make_assembled({"output_ids": [7]}, merge={"min_supervised_tokens": 2})
    with pytest.raises(UserError, match="every new one was dropped"):
        merge_run(run, settings)
    assert not run.dataset.exists()


def test_every_new_row_has_its_provenance_beside_it(make_assembled: Generated, base: Path) -> None:
    run, settings = make_assembled({"output_ids": [7]}, {}, {"output_ids": [9]}, base=base)
    merge_run(run, settings)
    provenance = pq.read_table(run.dataset / "provenance" / "data-00002.parquet")
    assert provenance.schema == PROVENANCE_SCHEMA
    assert provenance["prompt_id"].to_pylist() == ["p0", "p2"]
    new = datasets.load_from_disk(str(run.dataset)).to_list()[len(BASE_ROWS) :]
    assert provenance["tokens"].to_pylist() == [sample["seq_len"] for sample in new]


def test_several_runs_follow_one_another_and_are_accounted_for_each(
    make_assembled: Generated, base: Path, tmp_path: Path
) -> None:
    first, settings = make_assembled({"output_ids": [7]}, {"output_ids": [8]}, name="first")
    second, _ = make_assembled({"output_ids": [7]}, {"output_ids": [9]}, name="second")
    account = merge_runs([first, second], base, tmp_path / "merged", settings, verify=True)
    assert datasets.load_from_disk(str(tmp_path / "merged")).to_list() == [
        *BASE_ROWS,
        row([1, 2, 0, 7], 1),
        row([1, 2, 1, 8], 1),
        row([1, 2, 1, 9], 1),
    ]
    assert {name: (run["assembled"], run["samples"], run["dropped"]) for name, run in account["runs"].items()} == {
        "first": (2, 2, {}),
        "second": (2, 1, {"duplicate": 1}),
    }
    assert account["sources"]["questions"]["samples"] == 3


def test_a_merged_dataset_is_the_base_of_the_next_and_is_not_read_again(
    make_assembled: Generated, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, settings = make_assembled({"output_ids": [7]}, {"output_ids": [8]}, name="first")
    second, _ = make_assembled({"output_ids": [7]}, {"output_ids": [9]}, name="second")
    merge_runs([first], base, tmp_path / "one", settings, verify=True)

    def refuse(*_: object) -> None:
        raise AssertionError("a shard of the base was read")

    monkeypatch.setattr(content_index, "examine_shard", refuse)
    account = merge_runs([second], tmp_path / "one", tmp_path / "two", settings, verify=False)
    assert account["dropped"] == {"in_base": 1}
    assert {name: part["samples"] for name, part in account["sources"].items()} == {"existing": 3, "questions": 3}
    for name in ("data-00000.arrow", "index/data-00002.arrow", "provenance/data-00002.parquet"):
        assert (tmp_path / "two" / name).samefile(tmp_path / "one" / name)
    # Either can be removed without the other.
    shutil.rmtree(tmp_path / "one")
    assert verify_dataset(tmp_path / "two").samples == 6


def test_a_base_that_was_changed_is_indexed_anew(make_assembled: Generated, base: Path, tmp_path: Path) -> None:
    run, settings = make_assembled({"output_ids": [7]})
    assert merge_runs([run], base, tmp_path / "one", settings, verify=True)["dropped"] == {}
    shutil.rmtree(base)
    save(base, [*BASE_ROWS, row([1, 2, 0, 7], 1)])
    assert merge_runs([run], base, tmp_path / "two", settings, verify=True)["dropped"] == {"in_base": 1}


def test_an_index_that_another_merge_published_meanwhile_stays(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, index = base / "data-00000-of-00002.arrow", tmp_path / "index.arrow"
    examine_shard, published = content_index.examine_shard, tmp_path / "published"

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(content_index, "examine_shard", examine_shard)
        content_index.build_index(index, shard, None)
        published.hardlink_to(index)
        return examine_shard(*arguments)

    monkeypatch.setattr(content_index, "examine_shard", meanwhile)
    content_index.build_index(index, shard, None)
    assert index.samefile(published)


def test_a_run_named_twice_is_refused(make_assembled: Generated, tmp_path: Path) -> None:
    run, settings = make_assembled({})
    with pytest.raises(UserError, match="run run is named twice"):
        merge_runs([run, run], None, tmp_path / "merged", settings, verify=True)


def test_runs_and_bases_of_different_tokenizers_are_refused(
    make_assembled: Generated, base: Path, tmp_path: Path
) -> None:
    first, settings = make_assembled({"output_ids": [7]}, name="first")
    second, _ = make_assembled({"output_ids": [8]}, name="second")
    merge_runs([first], base, tmp_path / "merged", settings, verify=True)
    second.prepared.write_text(json.dumps({**read_json(second.prepared), "tokenizer": "another"}))
    with pytest.raises(UserError, match="runs first and second were made with different tokenizers"):
        merge_runs([first, second], base, tmp_path / "other", settings, verify=True)
    with pytest.raises(UserError, match="of another tokenizer than the runs' target"):
        merge_runs([second], tmp_path / "merged", tmp_path / "other", settings, verify=True)
    (base / "corpus.json").write_text('{"tokenizer": "a third"}')
    with pytest.raises(UserError, match="of another tokenizer than the runs' target"):
        merge_runs([first], base, tmp_path / "other", settings, verify=True)
    assert not (tmp_path / "other").exists()


def test_a_dataset_made_of_other_inputs_is_left_alone(make_assembled: Generated, base: Path, tmp_path: Path) -> None:
    run, settings = make_assembled({"output_ids": [7]})
    merge_runs([run], base, tmp_path / "merged", settings, verify=True)
    before = content(tmp_path / "merged")
    with pytest.raises(UserError, match=r"merged is there, made of base .*base and runs run; name another dataset"):
        merge_runs([run], None, tmp_path / "merged", settings, verify=True)
    assert content(tmp_path / "merged") == before


def test_verifying_finds_a_shard_that_was_changed(make_assembled: Generated, tmp_path: Path) -> None:
    run, settings = make_assembled({"output_ids": [7]}, {"output_ids": [8, 9]})
    merge_runs([run], None, tmp_path / "merged", settings, verify=True)
    with pa.ipc.new_stream(str(tmp_path / "merged" / "data-00000.arrow"), SAMPLE_SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist([row([1, 2, 0, 7], 1)], schema=SAMPLE_SCHEMA))
    with pytest.raises(UserError, match=r"differ: 2 samples, 9 tokens, 3 supervised and 1 samples, 4 tokens, 1 super"):
        merge_runs([run], None, tmp_path / "merged", settings, verify=True)


def test_a_base_with_other_column_names_is_taken_by_a_mapping(make_assembled: Generated, tmp_path: Path) -> None:
    rows = [{"tokens": r["input_ids"], "mask": r["loss_mask"], "seq_len": r["seq_len"], "id": "x"} for r in BASE_ROWS]
    other = save(tmp_path / "base", rows, features=None)
    columns = {"input_ids": "tokens", "loss_mask": "mask"}
    run, settings = make_assembled({"output_ids": [7]}, {}, base=other, merge={"base_columns": columns})
    before = content(other)
    account = merge_run(run, settings)
    assert account["base"]["how"] == "renamed"
    assert account["dropped"] == {"in_base": 1}
    assert datasets.load_from_disk(str(run.dataset)).to_list() == [*BASE_ROWS, row([1, 2, 0, 7], 1)]
    assert content(other) == before


def test_a_mapping_to_a_column_that_is_not_there_is_told(make_assembled: Generated, base: Path) -> None:
    run, settings = make_assembled({}, base=base, merge={"base_columns": {"input_ids": "tokens"}})
    with pytest.raises(
        UserError, match=r"merge\.base_columns names 'tokens', and its columns are input_ids, loss_mask"
    ):
        merge_run(run, settings)


def test_a_mapping_of_two_columns_to_one_is_told(make_assembled: Generated, base: Path) -> None:
    run, settings = make_assembled({}, base=base, merge={"base_columns": {"input_ids": "loss_mask"}})
    with pytest.raises(
        UserError, match="takes one column for two \\(input_ids: loss_mask, loss_mask: loss_mask, seq_len"
    ):
        merge_run(run, settings)


@pytest.mark.parametrize("name", ["merge.json", "corpus.json"])
@pytest.mark.parametrize(("text", "told"), [("{", "cannot be read: Expecting"), ("[]", "does not tell how")])
def test_a_damaged_record_of_the_corpus_is_told(
    make_assembled: Generated, base: Path, name: str, text: str, told: str
) -> None:
    (base / name).write_text(text)
    run, settings = make_assembled({}, base=base)
    with pytest.raises(UserError, match=rf"base/{name} {told}"):
        merge_run(run, settings)


def test_samples_and_provenance_that_disagree_are_refused(make_assembled: Generated) -> None:
    run, settings = make_assembled({}, {})
    path = run.provenance("questions-00000")
    with pa.ipc.new_stream(str(path), PROVENANCE_SCHEMA) as writer:
        writer.write_table(PROVENANCE_SCHEMA.empty_table())
    with pytest.raises(UserError, match=r"provenance\.arrow: 0 rows = 0, but 2 entered"):
        merge_run(run, settings)


def test_without_a_corpus_the_dataset_is_the_new_samples(make_assembled: Generated) -> None:
    run, settings = make_assembled({"output_ids": [7]}, {"output_ids": [9]})
    account = merge_run(run, settings)
    assert datasets.load_from_disk(str(run.dataset)).to_list() == [row([1, 2, 0, 7], 1), row([1, 2, 1, 9], 1)]
    assert account["base"] is None
    assert account["before"]["samples"] == 0


def test_new_content_has_a_new_fingerprint(make_assembled: Generated, base: Path) -> None:
    run, settings = make_assembled({"output_ids": [7]}, base=base)
    first = merge_run(run, settings)["fingerprint"]
    assert first != read_json(base / "state.json")["_fingerprint"]
    assert read_json(run.dataset / "state.json")["_fingerprint"] == first
    shutil.rmtree(run.dataset)
    assert merge_run(run, settings)["fingerprint"] == first


def test_shards_are_of_bounded_size(tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64())])
    tables = (pa.table({"n": [number] * 10}) for number in range(5))
    names = dataset_folder.write_shards(tmp_path, schema, tables, first=3, shard_bytes=160)
    assert names == ["data-00003.arrow", "data-00004.arrow", "data-00005.arrow"]
    dataset_folder.write_state(tmp_path, names, "0" * 16)
    loaded = datasets.load_from_disk(str(tmp_path))
    assert loaded["n"][:] == [number for number in range(5) for _ in range(10)]


def test_a_merge_waits_for_every_chunk(make_assembled: Generated) -> None:
    run, settings = make_assembled({}, {}, {}, {})
    run.assembled("questions-00001").unlink()
    with pytest.raises(UserError, match=r"1 of 2 chunks are not assembled \(questions-00001 is the first\)"):
        merge_run(run, settings)
    run.chunks.unlink()
    with pytest.raises(UserError, match="has no chunks"):
        merge_run(run, settings)


def test_a_run_without_one_sample_is_refused(make_assembled: Generated, base: Path) -> None:
    run, settings = make_assembled({"output_ids": []}, base=base)
    with pytest.raises(UserError, match="not one sample"):
        merge_run(run, settings)
    assert not run.dataset.exists()


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"input_ids": [1], "labels": [1], "seq_len": 1}], "no column loss_mask, unknown column labels"),
        ([{"input_ids": ["a"], "loss_mask": [1], "seq_len": 1}], "input_ids is list<item: string>"),
        ([{"input_ids": [1], "loss_mask": [1], "seq_len": 1, "extra": 1}], "unknown column extra"),
        ([{"input_ids": [True], "loss_mask": [1], "seq_len": 1}], "input_ids is list<item: bool>"),
    ],
)
def test_a_corpus_of_other_columns_is_told_what_differs(
    make_assembled: Generated, tmp_path: Path, rows: Answers, told: str
) -> None:
    run, settings = make_assembled({}, base=save(tmp_path / "base", rows, features=None, shards=1))
    with pytest.raises(UserError, match="expected input_ids: list<item: int32>") as caught:
        merge_run(run, settings)
    assert told in str(caught.value)
    assert not run.dataset.exists()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (row([1, 2], 0), "no token is supervised"),
        ({**row([1, 2], 1), "seq_len": 3}, "lengths disagree: 2 input_ids, 2 of loss_mask, seq_len 3"),
        ({**row([1, 2], 1), "loss_mask": [1]}, "lengths disagree"),
        ({**row([1, 2], 1), "loss_mask": [0, 2]}, "the value 2, which is neither 0 nor 1"),
        ({**row([1, 2], 1), "input_ids": None}, "a column is null"),
        ({**row([1, 2], 1), "input_ids": [1, None]}, "a token is null"),
        (row([1, 49_152], 1), "id 49152 is outside the vocabulary of 49152"),
        (row([-1, 3], 1), "id -1 is outside the vocabulary"),
        (row([], 0), "no token is supervised"),
    ],
)
def test_a_row_of_the_corpus_that_is_no_sample_is_named(
    make_assembled: Generated, tmp_path: Path, fault: dict[str, Any], told: str
) -> None:
    rows = [*BASE_ROWS, fault, row([5], 1)]
    run, settings = make_assembled({}, base=save(tmp_path / "base", rows, shards=1))
    with pytest.raises(UserError, match=r"data-00000-of-00001\.arrow row 3: ") as caught:
        merge_run(run, settings)
    assert told in str(caught.value)
    assert not run.dataset.exists()


def test_a_cast_that_would_lose_something_is_refused(make_assembled: Generated, tmp_path: Path) -> None:
    narrow = WIDE.copy()
    narrow["input_ids"] = datasets.Sequence(datasets.Value("int16"))
    run, settings = make_assembled({"output_ids": [40_000]}, base=save(tmp_path / "base", BASE_ROWS, narrow))
    with pytest.raises(UserError, match="do not fit the corpus' columns"):
        merge_run(run, settings)


def test_large_lists_and_boolean_masks_are_kept_as_they_are(make_assembled: Generated, tmp_path: Path) -> None:
    large = datasets.Features(
        {
            "input_ids": datasets.LargeList(datasets.Value("int32")),
            "loss_mask": datasets.LargeList(datasets.Value("bool")),
            "seq_len": datasets.Value("int32"),
        }
    )
    run, settings = make_assembled({}, {"output_ids": [9]}, base=save(tmp_path / "base", BASE_ROWS, large))
    account = merge_run(run, settings)
    merged = datasets.load_from_disk(str(run.dataset))
    assert merged.features == large
    assert account["after"]["supervised_tokens"] == sum(sum(sample) for sample in merged["loss_mask"])


@pytest.mark.parametrize("cut", [1, 8, 500])
def test_a_shard_cut_off_is_named(make_assembled: Generated, base: Path, cut: int) -> None:
    shard = base / "data-00001-of-00002.arrow"
    shard.write_bytes(shard.read_bytes()[:-cut])
    run, settings = make_assembled({}, base=base)
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow is cut off"):
        merge_run(run, settings)


def test_a_folder_that_is_no_dataset_is_told_apart(make_assembled: Generated, tmp_path: Path, base: Path) -> None:
    def refused(path: Path) -> str:
        run, settings = make_assembled({}, base=path)
        with pytest.raises(UserError) as caught:
            merge_run(run, settings)
        shutil.rmtree(run.root)
        return str(caught.value)

    assert "give a folder of save_to_disk" in refused(tmp_path / "nowhere")
    datasets.DatasetDict({"train": datasets.load_from_disk(str(base))}).save_to_disk(tmp_path / "splits")
    assert "several splits" in refused(tmp_path / "splits")
    (base / "data-00000-of-00002.arrow").unlink()
    assert "data-00000-of-00002.arrow cannot be read" in refused(base)


def test_shards_of_different_types_are_named(make_assembled: Generated, tmp_path: Path, base: Path) -> None:
    narrow = WIDE.copy()
    narrow["input_ids"] = datasets.Sequence(datasets.Value("int32"))
    other = save(tmp_path / "other", BASE_ROWS, narrow)
    shutil.copy(other / "data-00001-of-00002.arrow", base)
    run, settings = make_assembled({}, base=base)
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow has columns .*int32.* save it anew"):
        merge_run(run, settings)


def test_a_folder_in_the_place_of_the_dataset_is_left_alone(make_assembled: Generated) -> None:
    run, settings = make_assembled({})
    run.dataset.mkdir()
    with pytest.raises(UserError, match="no merge made it"):
        merge_run(run, settings)
    assert list(run.dataset.iterdir()) == []


def test_a_place_where_no_dataset_can_be_made_is_told(
    make_assembled: Generated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, settings = make_assembled({})
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nowhere")
    for dataset, told in (
        (file / "in" / "it", rf"cannot be made there, since {file} is no folder; name another"),
        (link, r"link is there, but no merge made it"),
    ):
        with pytest.raises(UserError, match=told):
            merge_runs([run], None, dataset, settings, verify=True)
    # Root may write anywhere.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match=rf"since {tmp_path} may not be written to"):
        merge_runs([run], None, tmp_path / "dataset", settings, verify=True)


def test_too_little_disk_is_told_before_anything_is_written(
    make_assembled: Generated, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, settings = make_assembled({}, base=base)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(UserError, match=r"the dataset needs 67 MB and 1 MB are free"):
        merge_run(run, settings)
    assert not run.dataset.exists()


def test_the_job_runs_twice_and_changes_nothing(
    make_assembled: Generated, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_assembled({}, {}, base=base)
    monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
    merge("run")
    before = content(run.dataset)
    merge("run")
    assert content(run.dataset) == before
    assert [path.name for path in run.root.iterdir() if path.name.startswith(".")] == []
