"""The lines that `broken_lines` breaks are there, and so are the tests that must fail then: running them takes long."""

from __future__ import annotations

import pytest

from tests.parity.broken_lines import BREAKS, ROOT, Break


@pytest.mark.parametrize("broken", BREAKS, ids=[broken.what for broken in BREAKS])
def test_the_line_is_there_once_and_its_test_exists(broken: Break) -> None:
    assert (ROOT / "dflash" / broken.file).read_text().count(broken.old) == 1
    path, test = broken.test.split("::")
    assert f"def {test}(" in (ROOT / path).read_text()
