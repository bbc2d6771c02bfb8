"""Ratios are taken within rounds."""

from __future__ import annotations

import pytest

from paceline.bench.statistics import ratios, slowest, spread


def test_a_round_that_was_slow_for_both_does_not_count() -> None:
    ours, theirs = [1.0, 10.0, 2.0], [2.0, 20.0, 4.0]
    found = ratios(ours, theirs)
    assert (found.low, found.median, found.high) == (0.5, 0.5, 0.5)


def test_spread_is_median_and_quartiles() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert found.to_json() == {"median": 3.0, "low": 2.0, "high": 4.0}


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


def test_ranks_must_have_run_the_same_rounds() -> None:
    with pytest.raises(ValueError):
        slowest([[1.0], [2.0, 3.0]])
