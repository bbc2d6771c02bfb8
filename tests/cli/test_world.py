"""What a launcher leaves in the environment."""

from __future__ import annotations

import pytest

from paceline.cli.world import World
from paceline.errors import LaunchError, PlanError
from paceline.plan import Mesh


def test_no_launcher_no_world() -> None:
    assert World.from_environment({"HOME": "/"}) is None


def test_a_launchers_world_is_read() -> None:
    assert World.from_environment({"RANK": "1", "WORLD_SIZE": "4"}) == World(1, 4)


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}],
)
def test_half_a_launcher_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(LaunchError):
        World.from_environment(environment)


def test_a_world_that_does_not_fit_the_mesh_is_told_what_would() -> None:
    World(0, 2).check(Mesh.parse("dp=2"), "processes")
    with pytest.raises(PlanError, match=r"started 4 ranks, but mesh 'dp=2' has 2.*--mesh dp=4"):
        World(0, 4).check(Mesh.parse("dp=2"), "processes")
    with pytest.raises(LaunchError, match="inprocess"):
        World(0, 2).check(Mesh.parse("dp=2"), "inprocess")
