"""Integer programs are solved however little time there is."""

from __future__ import annotations

import math

import pytest

from paceline.placement import integer
from paceline.placement.integer import IntegerProgram


def knapsack() -> IntegerProgram:
    """Three things of which two are to be taken, the cheapest that weigh at least 5 together."""
    program = IntegerProgram()
    things = [program.variable(cost, whole=True) for cost in (1.0, 2.0, 4.0)]
    program.constrain([(thing, 1.0) for thing in things], 2, 2)
    program.constrain(list(zip(things, (1.0, 3.0, 4.0), strict=True)), 5, math.inf)
    return program


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_what_there_is_is_found_also_when_time_is_over(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "_TIME_LIMIT_S", seconds)
    found = knapsack().solve()
    assert found is not None and found.values.round().tolist() == [1, 0, 1] and found.objective == pytest.approx(5)
    assert knapsack().least([(0, 1.0), (1, 1.0)]) == pytest.approx(1)


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_where_there_is_nothing_none_is_found(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "_TIME_LIMIT_S", seconds)
    program = knapsack()
    program.constrain([(0, 1.0), (1, 1.0), (2, 1.0)], 3, 3)
    assert program.solve() is None
    assert program.least([(0, 1.0)]) == math.inf
