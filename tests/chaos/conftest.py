"""Runs to generate for."""

from tests.making_runs import make_run

__all__ = ["make_run"]
