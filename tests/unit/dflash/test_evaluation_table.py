"""An acceptance report is shown whole in a narrow terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from dflash.evaluation_table import print_evaluation


def part(acceptance_length: float | None) -> dict[str, Any]:
    return {
        "prompts": 400,
        "degenerate": 12,
        "tokens": 1_084_800,
        "acceptance_length": acceptance_length,
        "tree": {"acceptance_length": 4.321},
        "tokens_per_target_call": 3.141,
        "tokens_per_second": 1234.5,
        "target_alone_tokens_per_second": 456.7,
        "recall": 0.891,
        "oracle_length": 6.543,
        "acceptance_by_position": [0.9, 0.5],
    }


def test_every_number_is_whole_in_eighty_columns() -> None:
    lossless = {"lossless": True, "compared_tokens": 1_084_800, "mismatches": [], "numeric_ties": [3]}
    report = {
        "overall": part(3.254),
        "by_source": {"code": part(3.254), "chat": part(None)},
        "by_thinking": {"on": part(3.254), "off": part(3.254)},
        "not_decoded": None,
        "lossless": lossless,
        "tree_lossless": lossless,
    }
    output = io.StringIO()
    print_evaluation(report, Console(file=output, width=80))
    numbers = "400 12 1,084,800 3.254 4.321 3.141 1234.5 456.7 0.891 6.543"
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    assert "…" not in output.getvalue()
    assert f"code {numbers}" in lines
    assert f"chat {numbers.replace('3.254', '-')}" in lines
    assert f"all {numbers}" in lines
    assert "guesses 1, 2, ... kept: 0.90 0.50" in lines
    assert "greedy with trees: 1,084,800 tokens equal the target's own, 0 prompts differ, 1 numeric ties" in lines
