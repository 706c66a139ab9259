"""The script for a card runs: at small size and on the CPU, so that it is not broken when a card comes."""

from __future__ import annotations

import torch

from tests.gpu.measure import measure


def test_the_measurements_for_a_card_run_small_on_the_cpu() -> None:
    readings = measure(torch.device("cpu"), small=True)
    assert readings["failed"] == []
    for attention in ("flex", "sdpa"):
        found = readings[attention]
        assert found["parity"]["gradient_difference"] < 1e-4
        assert found["step"]["draft_rows_per_s"] > 0
        assert found["plain"]["plain_seconds"] > 0
