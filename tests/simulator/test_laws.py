"""Amdahl's and Gustafson's laws: what is fitted is what made the numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.simulator.laws import (
    amdahl_limit,
    amdahl_speedup,
    fit_amdahl,
    fit_gustafson,
    fitted,
    gustafson_speedup,
)

FRACTIONS = st.floats(0, 1)
RANKS = st.lists(st.integers(2, 1024), min_size=1, max_size=6, unique=True).map(lambda more: [1, *more])
SECONDS = st.floats(1e-4, 1e4)


@given(FRACTIONS, RANKS, SECONDS)
def test_amdahls_fraction_is_found_again(fraction: float, ranks: list[int], one_s: float) -> None:
    assert fit_amdahl(ranks, one_s / amdahl_speedup(fraction, ranks)) == pytest.approx(fraction, abs=1e-7)


@given(FRACTIONS, RANKS, SECONDS)
def test_gustafsons_fraction_is_found_again(fraction: float, ranks: list[int], one_s: float) -> None:
    many = np.array(ranks)
    assert fit_gustafson(ranks, many * one_s / gustafson_speedup(fraction, many)) == pytest.approx(fraction, abs=1e-9)


@given(FRACTIONS, st.integers(1, 10**6))
def test_no_law_promises_more_than_ranks_and_one_rank_is_one(fraction: float, ranks: int) -> None:
    fixed, grown = amdahl_speedup(fraction, ranks), gustafson_speedup(fraction, ranks)
    assert 1 - 1e-9 <= fixed <= grown * (1 + 1e-9) and grown <= ranks
    assert fixed <= amdahl_limit(fraction) * (1 + 1e-9)
    assert amdahl_speedup(fraction, 1) == pytest.approx(1) and gustafson_speedup(fraction, 1) == 1


@given(FRACTIONS.filter(lambda s: s > 1e-3), st.integers(2, 512))
def test_both_laws_are_one_law_seen_from_both_ends(fraction: float, ranks: int) -> None:
    """A share s of the time on one rank is s / (s + (1 - s) / n) of the time on n."""
    on_ranks = fraction / (fraction + (1 - fraction) / ranks)
    assert gustafson_speedup(on_ranks, ranks) == pytest.approx(amdahl_speedup(fraction, ranks))


def test_ranks_that_help_each_other_have_a_negative_fraction_and_a_prediction_that_is_ideal() -> None:
    fraction = fit_amdahl([1, 2, 4], [1.0, 0.45, 0.2])
    assert fraction < 0 and amdahl_speedup(fraction, 8) == 8 and amdahl_limit(fraction) == math.inf


def test_ranks_that_hinder_each_other_have_a_fraction_above_one_and_no_speed_up() -> None:
    fraction = fit_amdahl([1, 2], [1.0, 2.0])
    assert fraction > 1 and amdahl_speedup(fraction, 8) == amdahl_limit(fraction) == 1
    grown = fit_gustafson([1, 2], [1.0, 3.0])
    assert grown > 1 and gustafson_speedup(grown, 8) == 1


def test_each_number_of_ranks_counts_alike() -> None:
    """A fit of seconds themselves would hardly see what eight ranks took."""
    seconds = 100 / amdahl_speedup(0.02, [1, 2, 4, 8])
    off = fit_amdahl([1, 2, 4, 8], seconds * np.array([1, 1, 1, 1.2]))
    assert off > 0.035


def test_fractions_need_two_numbers_of_ranks_and_gustafsons_one_rank() -> None:
    with pytest.raises(ValueError, match="two numbers"):
        fit_amdahl([2, 2], [1.0, 1.0])
    with pytest.raises(ValueError, match="one rank"):
        fit_gustafson([2, 4], [1.0, 1.0])


@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_the_uncertainty_is_that_of_the_rounds(seed: int) -> None:
    """Nine of ten intervals hold the truth; of 40, fewer than 28 do once in 10,000 times."""
    random, ranks, truth = np.random.default_rng(seed), [1, 2, 4], 0.1
    exact = 1 / amdahl_speedup(truth, ranks)
    held = 0
    for draw in range(40):
        rounds = exact * np.exp(0.03 * random.standard_normal((15, 3)))
        found = fitted(fit_amdahl, ranks, rounds, seed=draw)
        assert found.low <= found.high
        held += found.low <= truth <= found.high
    assert held >= 26
    still = fitted(fit_amdahl, ranks, np.tile(exact, (5, 1)))
    assert still.low == still.high == pytest.approx(truth)
