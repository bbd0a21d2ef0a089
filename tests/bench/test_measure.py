"""The order of the timed calls, the statistics of their times, and their text."""

from __future__ import annotations

import pytest

from topw_lab.bench.base import Spread, interleave, ratio
from topw_lab.tables import duration, percentage, significant, table


def turns(rounds: int, seed: int | None = None) -> list[str]:
    called: list[str] = []

    def side(name: str) -> float:
        called.append(name)
        return float(len(called))

    interleave({name: (lambda name=name: side(name)) for name in "abc"}, rounds, 0, seed=seed)
    return called


def test_a_seed_shuffles_the_rounds_and_repeats() -> None:
    orders = [tuple(turns(40, seed=1)[i : i + 3]) for i in range(0, 120, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) == 6
    assert turns(40, seed=1) == turns(40, seed=1) != turns(40, seed=2)


def test_warm_up_rounds_are_discarded_but_shown_as_progress() -> None:
    values = iter(range(10))
    ticks: list[int] = []
    samples = interleave({"only": lambda: next(values)}, 3, warmup=2, advance=ticks.append)
    assert samples == {"only": [2, 3, 4]}
    assert ticks == [1] * 5


def test_a_ratio_is_taken_round_by_round() -> None:
    drifting = {"ours": [1.0, 2.0, 40.0], "theirs": [2.0, 4.0, 80.0]}
    assert ratio(drifting, "theirs", "ours") == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (significant(0.0), "0"),
        (significant(0.01234), "0.0123"),
        (significant(1.0), "1.00"),
        (significant(17.44), "17.4"),
        (significant(99.96), "100"),
        (significant(1234.5), "1,230"),
        (significant(0.9996), "1.00"),
        (duration(17.4e-6), "17.4 us"),
        (duration(2e-3), "2.00 ms"),
        (duration(2e-8), "0.0200 us"),
        (duration(0.9e-3, 1.1e-3, 2e-3), "1.10 ms (0.900-2.00)"),
        (percentage(1, 10_000), "0.1 %"),
        (percentage(9_999, 10_000), "99.9 %"),
        (percentage(2, 2), "100.0 %"),
        (percentage(0, 0), "-"),
        (table(("side", "x"), [("a", 1), ("b", 22)]),
         "| side |    x |\n|------|-----:|\n| a    |    1 |\n| b    |   22 |"),
    ],
)  # fmt: skip
def test_numbers_and_tables_read_well(text: str, expected: str) -> None:
    assert text == expected
