"""Collectives of a job by size, measured through what carries them; between sizes they are interpolated."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import PlanError
from paceline.plan import Mesh
from paceline.runtime.link_times import KINDS, MeasuredCollectives, interpolated, measured_collectives
from paceline.runtime.peers import connect
from tests.ranks import ranks

POINTS = ((10.0, 1.0), (20.0, 2.0), (40.0, 6.0))


@pytest.mark.parametrize(("nbytes", "seconds"), [(1, 1.0), (10, 1.0), (15, 1.5), (20, 2.0), (30, 4.0), (60, 10.0)])
def test_between_sizes_seconds_grow_straight_and_beyond_them_as_before(nbytes: float, seconds: float) -> None:
    assert interpolated(POINTS, nbytes) == pytest.approx(seconds)
    assert interpolated(POINTS[:1], nbytes) == 1.0


def test_a_broadcast_is_answered_by_a_gathering_and_what_is_unknown_is_refused() -> None:
    found = MeasuredCollectives({"dp": {"all_reduce": POINTS, "all_gather": POINTS[1:]}})
    assert found.seconds("all_reduce", 15, "dp") == 1.5
    assert found.seconds("broadcast", 30, "dp") == 4.0
    with pytest.raises(PlanError, match="send along 'dp'"):
        found.seconds("send", 1, "dp")
    with pytest.raises(PlanError, match="measured: dp"):
        found.seconds("all_reduce", 1, "tp")


@ranks(2)
@pytest.mark.parametrize("axis", ["dp", "fsdp", "tp"])
def test_every_collective_is_measured_along_every_axis(rank: int, axis: str) -> None:
    mesh = Mesh(((axis, 2),))
    peers = connect(mesh, torch.device("cpu"), compile=False)
    found = measured_collectives(peers, mesh, sizes=(1 << 10, 1 << 14))
    assert set(found.points) == {axis} and set(found.points[axis]) == set(KINDS)
    for points in found.points[axis].values():
        assert [size for size, _ in points] == [1024.0, 16384.0]
        assert all(seconds > 0 for _, seconds in points)
