"""Values that rows begin with are spread as they say."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from paceline.exchange.job import Initializer
from paceline.exchange.table.initial import Beginning, logarithm, normal

_KEYS = np.arange(20_000, dtype=np.int64) * 3 - 7


def test_normal_is_the_inverse_of_the_distribution():
    between = [1e-300, 1e-20, 1e-5, 0.02, 0.074, 0.0751, 0.3, 0.5, 0.7, 0.93, 0.98, 1 - 1e-12]
    expected = [NormalDist().inv_cdf(x) for x in between]
    np.testing.assert_allclose(normal(np.array(between)), expected, rtol=1e-13, atol=1e-15)


def test_logarithm():
    x = np.array([5e-308, 1e-20, 0.3, 0.70710678, 0.7072, 1 - 1e-16, 1.0, 1.5, 3e5, 1e300])
    np.testing.assert_allclose(logarithm(x), [math.log(one) for one in x], rtol=1e-15, atol=1e-17)


@pytest.mark.parametrize(
    ("name", "deviation", "most"), [("normal", 0.5, 3.0), ("uniform", 0.5 / math.sqrt(3), 0.5), ("zeros", 0.0, 0.0)]
)
def test_spread(name, deviation, most):
    values = Beginning.of(Initializer(name, 0.5), 11).values(_KEYS, 4, np.dtype(np.float64))
    error = 5 * deviation / math.sqrt(values.size)
    assert abs(values.mean()) <= error
    assert abs(values.std() - deviation) <= error
    assert np.abs(values).max() <= most
    assert name == "zeros" or abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.05
    assert name == "zeros" or abs(np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1]) < 0.05


def test_values_are_pinned():
    """What a row begins with is part of every run: it may not change between versions."""
    values = Beginning.of(Initializer("normal", 1.0), 1).values(np.array([0, -5]), 2, np.dtype(np.float64))
    assert [[x.hex() for x in row] for row in values.tolist()] == [
        ["-0x1.5ae92aa9f2dc9p-3", "-0x1.8002da9e78ef4p-3"],
        ["-0x1.c9bb4a4cdcefap-1", "0x1.f07fe66674e73p-4"],
    ]
