"""A user's .env keeps everything but the line that is changed."""

from pathlib import Path

import pytest

from services.errors import UserError
from services.stack.operate.env_file import read_variables, set_variable


def test_one_line_changes_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("# mine\nVERSION=1.2\n\nTRAINER_IMAGE=old  \n# end\n")
    path.chmod(0o600)
    set_variable(path, "TRAINER_IMAGE", "new")
    assert path.read_text() == "# mine\nVERSION=1.2\n\nTRAINER_IMAGE=new\n# end\n"
    set_variable(path, "PRODUCERS", "4")
    assert path.read_text().endswith("# end\nPRODUCERS=4\n")
    set_variable(path, "TRAINER_IMAGE", None)
    assert path.read_text() == "# mine\nVERSION=1.2\n\n# end\nPRODUCERS=4\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_comment_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("# Text with A=B in it.\nMODEL_DIR=\nURL=a=b\n#PRODUCERS=1\n")
    assert read_variables(path) == {"MODEL_DIR": "", "URL": "a=b"}


def test_values_are_read_as_compose_reads_them(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("A='x # y'\nB=\"monitoring,train\"  # what is up\nC=monitoring # what is up\nD=a#b \nE=#none\n")
    expected = {"A": "x # y", "B": "monitoring,train", "C": "monitoring", "D": "a#b", "E": "#none"}
    assert read_variables(path) == expected


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"copy \.env\.example"):
        read_variables(tmp_path / ".env")
