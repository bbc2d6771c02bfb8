"""Shapes of slices, and what groups have of them."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.torus import shape, ways


@pytest.mark.parametrize(
    ("devices", "axes", "expected"),
    [(512, 3, (8, 8, 8)), (64, 3, (4, 4, 4)), (8960, 3, (16, 20, 28)), (256, 2, (16, 16)), (7, 3, (1, 1, 7))],
)
def test_slices_are_as_equal_as_their_factors_allow(devices: int, axes: int, expected: tuple[int, ...]) -> None:
    assert shape(devices, axes) == expected


@given(st.integers(1, 10000), st.integers(1, 3))
def test_a_shape_holds_all_chips(devices: int, axes: int) -> None:
    assert prod(shape(devices, axes)) == devices


def test_who_spans_more_axes_has_more_links_and_longer_ways() -> None:
    found = ways(512, 3, np.array([4.0, 8.0, 64.0, 512.0]), np.ones(4))
    assert found.links.tolist() == [1, 2, 4, 6]
    assert found.hops.tolist() == [3, 4, 8, 12]
    # A line of four is crossed in its middle by as much as a ring of eight.
    assert found.crowding.tolist() == [1, 1, 1, 1]
