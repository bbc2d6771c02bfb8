"""The fullest of links onto which flows are hashed, against exact expectations."""

from __future__ import annotations

from fractions import Fraction
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.hashing import fullest


def exactly(flows: int, links: int) -> float:
    """Sum over k of the probability that some link has more than k: multinomials, counted by generating functions."""
    total = Fraction(0)
    for most in range(flows):
        ways = [Fraction(1)] + [Fraction(0)] * flows
        for _ in range(links):
            ways = [sum(ways[n - j] / factorial(j) for j in range(min(most, n) + 1)) for n in range(flows + 1)]
        total += 1 - ways[flows] * factorial(flows) / Fraction(links) ** flows
    return float(total)


@pytest.mark.parametrize(("flows", "links"), [(1, 4), (2, 2), (4, 4), (8, 8), (16, 8), (12, 3), (8, 16), (24, 4)])
def test_small_numbers(flows: int, links: int) -> None:
    assert fullest(np.array(float(flows)), np.array(float(links))) == pytest.approx(exactly(flows, links))


def test_one_flow_and_one_link_are_no_matter_of_chance() -> None:
    assert fullest(np.array([1.0, 1.0, 7.0]), np.array([1.0, 64.0, 1.0])).tolist() == [1.0, 1.0, 7.0]


def test_many_flows_even_out() -> None:
    flows = np.array([64.0, 640.0, 6400.0, 640000.0])
    excess = fullest(flows, np.full(4, 64.0)) / (flows / 64)
    assert np.all(np.diff(excess) < 0)
    assert 3.5 < excess[0] < 5 and excess[3] < 1.03


@given(st.integers(1, 5000), st.integers(1, 512))
def test_no_link_has_less_than_its_share_nor_more_than_all(flows: int, links: int) -> None:
    found = float(fullest(np.array(float(flows)), np.array(float(links))))
    assert max(1, flows / links) <= found <= flows
    more = float(fullest(np.array(flows + 1.0), np.array(float(links))))
    assert more >= found * (1 - 1e-9)
