"""PipeDream's partition for a module: what it is, beside the plain layouts, and what to write into the recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import PlanError, ScheduleError
from paceline.plan import Plan
from paceline.planner.flow import Flow, placed_on_inner
from paceline.planner.partition import Layer, Level, Partition, partition, replicated
from paceline.planner.profile import bandwidth_of, profile
from paceline.schedule import Kind


@dataclass(frozen=True)
class Partitioned:
    """A partition that was found.

    Attributes:
        plan: that was given.
        samples: of a micro-batch.
        layers: the profile.
        machine: the ranks, and what connects them.
        found: the best partition.
        pipeline: the best one with one rank for each stage; None where there is none.
        data: seconds per micro-batch of all layers on every rank.
    """

    plan: Plan
    samples: int
    layers: tuple[Layer, ...]
    machine: tuple[Level, ...]
    found: Partition
    pipeline: Partition | None
    data: float

    @property
    def boundaries(self) -> tuple[str, ...]:
        """The modules with which stages begin, all but the first."""
        return tuple(self.layers[stage.first].name for stage in self.found.stages[1:])

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many ranks each stage has."""
        return tuple(stage.replicas for stage in self.found.stages)

    @property
    def schedule(self) -> str:
        """That of the plan, or 1F1B where that cannot have stages of several ranks."""
        given = self.plan.pipeline.schedule
        try:
            fits = Kind.of(given).replicates
        except ScheduleError:  # it is a file
            fits = False
        return given if fits or set(self.replicas) == {1} else Kind.ONE_F_ONE_B.value


def find_partition(
    flow: Flow, plan: Plan, *, bandwidth: float | None = None, tell: Callable[[str], None] = lambda _: None
) -> Partitioned:
    """Return PipeDream's partition among the pipeline ranks of a plan.

    Args:
        flow: module and micro-batch.
        plan: its inner mesh is what each stage is placed on.
        bandwidth: bytes per second between ranks; by default as measured on this machine, or a round figure.
        tell: is told what is being done.

    Raises:
        CaptureError, PlacementError: see `planner.explain`.
        PlanError: the mesh has no pipeline, or the layers cannot be divided so.
    """
    ranks = plan.mesh.stage_ranks
    if ranks < 2:
        raise PlanError(f"the mesh '{plan.mesh}' has no pipeline to partition; name one, as in --mesh pp=4.")
    layers = profile(placed_on_inner(flow, plan, tell).program, flow.costs)
    tell("looking for stages")
    level = Level(ranks, bandwidth_of(flow.costs) if bandwidth is None else bandwidth)
    try:
        plain = partition(layers, [level], replicate=False)
    except PlanError:
        plain = None
    found = partition(layers, [level])
    return Partitioned(plan, flow.samples, tuple(layers), (level,), found, plain, replicated(layers, level))
