"""Packs are nearly full, every row has its turn, and a run goes on in its data exactly where it was."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash.packing import Cursor, DataOrder, PackLimits, pack_rows, padding, with_limits

LIMITS = PackLimits(token_budget=8192, max_batch_size=64)


def lengths_of(count: int) -> NDArray[np.int64]:
    """Lengths as of chats and thinking: most short, some up to the longest."""
    return np.random.default_rng(0).lognormal(6.3, 1.0, count).astype(np.int64).clip(8, 4096)


def data_order(lengths: NDArray[np.int64], limits: PackLimits = LIMITS) -> DataOrder:
    return DataOrder(lambda epoch: np.random.default_rng(epoch).permutation(len(lengths)), lengths, limits, 5)


def test_packs_hold_every_row_once_within_the_limits() -> None:
    lengths = lengths_of(9000)
    packs = list(pack_rows(np.arange(9000), lengths, LIMITS, np.random.default_rng(0)))
    assert sorted(row for pack in packs for row in pack) == list(range(9000))
    assert all(lengths[pack].sum() <= 8192 and len(pack) <= 64 for pack in packs)


@pytest.mark.parametrize("limits", [LIMITS, PackLimits(49_152, 64), PackLimits(45_056, 128)])
def test_less_than_five_percent_of_a_pack_is_padding(limits: PackLimits) -> None:
    lengths = lengths_of(20_000) if limits == LIMITS else lengths_of(20_000).clip(min=900)
    packs = list(pack_rows(np.arange(20_000), lengths, limits, np.random.default_rng(0)))
    assert padding(packs, lengths, limits.token_budget) < 0.05


def test_short_rows_do_not_end_up_in_packs_that_are_full_by_their_number() -> None:
    lengths = np.random.default_rng(0).lognormal(3.9, 0.7, 20_000).astype(np.int64).clip(8, 400)
    packs = list(pack_rows(np.arange(20_000), lengths, PackLimits(4096, 64), np.random.default_rng(0)))
    assert len(packs) < 1.03 * max(20_000 / 64, lengths.sum() / 4096)


def test_a_long_pack_comes_no_earlier_than_another() -> None:
    lengths = lengths_of(4000)
    packs = list(pack_rows(np.arange(4000), lengths, LIMITS, np.random.default_rng(0)))
    longest = [int(lengths[pack].max()) for pack in packs]
    half = len(packs) // 2
    assert abs(np.mean(longest[:half]) - np.mean(longest[half:])) < 0.2 * np.mean(longest)


def test_epochs_differ_and_are_the_same_again() -> None:
    order = data_order(lengths_of(300))
    first = [pack for pack, _ in islice(order.packs_from(Cursor()), 60)]
    assert first == [pack for pack, _ in islice(order.packs_from(Cursor()), 60)]
    epochs = {pack.epoch for pack in first}
    assert len(epochs) > 1
    assert first[0].rows != next(pack.rows for pack in first if pack.epoch == 1)


def test_the_order_goes_on_from_any_cursor() -> None:
    order = data_order(lengths_of(300))
    whole = list(islice(order.packs_from(Cursor()), 60))
    for at in range(0, 59, 7):
        rest = [pack for pack, _ in islice(order.packs_from(whole[at][1]), 59 - at)]
        assert rest == [pack for pack, _ in whole[at + 1 :]]


def test_with_other_limits_an_epoch_still_takes_every_row_once() -> None:
    lengths = lengths_of(300)
    taken = []
    cursor = Cursor()
    for limits, count in ((LIMITS, 5), (PackLimits(6000, 48), 6), (PackLimits(4096, 8), 10_000)):
        order = data_order(lengths, limits)
        numbers = []
        for pack, after in islice(order.packs_from(cursor), count):
            if pack.epoch > 0:
                break
            taken += pack.rows
            numbers.append(pack.pack)
            cursor = after
        cursor = with_limits(cursor, limits, PackLimits(1, 1))
    assert sorted(taken) == list(range(300))
