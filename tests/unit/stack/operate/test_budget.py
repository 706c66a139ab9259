"""Which growth of an image's memory is too much."""

from services.stack.operate.budget import over

BEFORE = {"resident": {"import": 400_000_000, "kernels": 450_000_000}}


def test_growth_within_the_margin_is_let_pass() -> None:
    assert over(BEFORE, {"resident": {"import": 500_000_000, "kernels": 450_000_000}}, 100_000_000) == []


def test_growth_over_the_margin_is_told_by_stage() -> None:
    after = {"resident": {"import": 612_000_000, "kernels": 660_000_000}}
    assert over(BEFORE, after, 100_000_000) == [
        "resident import: 612 MB, 212 MB more",
        "resident kernels: 660 MB, 210 MB more",
    ]


def test_with_cards_it_is_each_cards_memory_that_counts() -> None:
    before = {"resident": {"import": 1}, "card 0": {"context": 300_000_000}, "card 1": {"context": 300_000_000}}
    after = {"resident": {"import": 10**9}, "card 0": {"context": 310_000_000}, "card 1": {"context": 500_000_000}}
    assert over(before, after, 100_000_000) == ["card 1 context: 500 MB, 200 MB more"]


def test_a_stage_that_was_not_measured_before_is_no_growth() -> None:
    assert over(BEFORE, {"resident": {"model": 10**12}}, 0) == []
