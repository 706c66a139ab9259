"""What a killed process left is removed, and what another one uses is not."""

from pathlib import Path

from services.files import scratch_folder


def test_a_folder_is_there_for_as_long_as_it_is_used(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "new", "source") as folder:
        (folder / "rows").write_text("1")
    assert list((tmp_path / "new").iterdir()) == []


def test_only_folders_that_nobody_uses_are_removed(tmp_path: Path) -> None:
    left, other = tmp_path / ".source.left.tmp", tmp_path / ".source-b.left.tmp"
    for folder in (left, other):
        folder.mkdir()
        (folder / "rows").write_text("1")
    with scratch_folder(tmp_path, "source") as first, scratch_folder(tmp_path, "source") as second:
        assert not left.exists()
        assert first.is_dir()
        assert second.is_dir()
    assert other.is_dir()
