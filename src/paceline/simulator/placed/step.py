"""One training step of a mesh without stages in virtual time: passes, exchange of gradients, norm and update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from paceline.placement.placements import Shard
from paceline.plan import Plan
from paceline.program.program import InputRole
from paceline.runtime.step import PlacedInput, Step
from paceline.simulator.placed.carriers import Carrier
from paceline.simulator.placed.memory import Peak
from paceline.simulator.placed.ranks import Ranks, Seconds
from paceline.simulator.placed.simulation import RankTold, Simulation
from paceline.simulator.placed.step_memory import peak_of_step
from paceline.simulator.placed.times import Times
from paceline.simulator.placed.update import MakeOptimizer, Update, adamw, update_of
from paceline.simulator.placed.walk import walk
from paceline.simulator.placed.workspace import Workspaces
from paceline.trace import BACKWARD, FORWARD, NORM, UPDATE, Category

_SUM_BYTES = 8
_WALKED = 2
"""So many micro-batches are walked; further ones take as long as the last of these."""


@dataclass(frozen=True)
class Circumstances:
    """What a step depends on beside its program and its plan.

    Attributes:
        micro_batches: of a step, one after the other.
        optimizer: makes the optimizer of what a rank holds.
        clips: gradients are scaled by their norm.
        slowness: by how much single ranks compute slower than the others.
        workspaces: what operators take for themselves.
        watched: ranks whose events are wanted; by default rank 0 and the slow ones.
    """

    micro_batches: int = 1
    optimizer: MakeOptimizer = adamw
    clips: bool = False
    slowness: Mapping[int, float] = field(default_factory=dict)
    workspaces: Workspaces | None = None
    watched: tuple[int, ...] | None = None


def simulate_step(step: Step, plan: Plan, times: Times, given: Circumstances | None = None) -> Simulation:
    """Return what a step comes to.

    Args:
        step: as ranks run it.
        plan: that it was placed by.
        times: how long calls and collectives take.
        given: what it depends on beside.
    """
    given = given or Circumstances()
    update = update_of(list(trained_pieces(step).values()), given.optimizer, clips=given.clips)
    ranks = Ranks(step.mesh, given.slowness, times.launch_s, given.watched)
    phases = _Phases(ranks)
    _passes(step, times, ranks, phases, update, given.micro_batches)
    passes_end, passes_computed, passes_exposed = ranks.now, ranks.computed, dict(ranks.exposed)
    with_norm = phases.start(NORM)
    walk(update.norm, times, ranks)
    _sum_over_ranks(step, times, ranks)
    phases.end(with_norm)
    begun = phases.start(UPDATE)
    walk(update.step, times, ranks)
    phases.end(begun)
    if times.constant_s:
        ranks.skip(np.full_like(ranks.now, times.constant_s))
    carrier = Carrier.SHARED_MEMORY if times.shares_memory else Carrier.FUNCTIONAL
    peak = peak_of_step(step, plan, update, carrier, given.micro_batches, given.workspaces)
    account = _Account(passes_end, passes_computed, passes_exposed)
    return Simulation(
        plan=plan,
        step_s=float(ranks.now.max()),
        micro_batches=given.micro_batches,
        ranks=tuple(account.told(ranks, rank, peak) for rank in ranks.watched or ()),
        source=times.source,
        events=tuple(ranks.events),
        phases=phases.seconds,
    )


def trained_pieces(step: Step) -> dict[str, Tensor]:
    """Return the pieces of trained parameters on a rank, without data, by name."""
    wanted = set(step.gradients)
    return {
        placed.item.name: value
        for placed, value in placed_values(step)
        if placed.item.role is InputRole.PARAMETER and placed.item.name in wanted
    }


def placed_values(step: Step) -> list[tuple[PlacedInput, Tensor]]:
    """Return the inputs of a step, each with its piece on a rank, without data."""
    nodes = [node for node in step.forward.nodes if node.op == "placeholder"]
    return [(placed, node.meta["val"]) for placed, node in zip(step.inputs, nodes, strict=True)]


class _Phases:
    """Notes the parts of a step."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.seconds: dict[str, float] = {}

    def start(self, name: str) -> tuple[str, Seconds]:
        return name, self._ranks.now

    def end(self, started: tuple[str, Seconds], **arguments: int) -> None:
        name, began = started
        ranks = self._ranks
        ranks.note(name, Category.PHASE, began, ranks.now, **arguments)
        self.seconds[name] = self.seconds.get(name, 0.0) + ranks.of(0, ranks.now) - ranks.of(0, began)


def _passes(step: Step, times: Times, ranks: Ranks, phases: _Phases, update: Update, micro_batches: int) -> None:
    """Walk the first micro-batches; let the time of the others pass."""
    before = ranks.snapshot()
    for index in range(min(micro_batches, _WALKED)):
        before = ranks.snapshot()
        for name, graph in ((FORWARD, step.forward), (BACKWARD, step.backward)):
            if graph is not None:
                begun = phases.start(name)
                walk(graph, times, ranks)
                if name == BACKWARD and index:
                    walk(update.add, times, ranks)
                phases.end(begun, micro_batch=index)
    if micro_batches > _WALKED:
        ranks.repeat(before, micro_batches - _WALKED)
        phases.seconds = {name: seconds * micro_batches / _WALKED for name, seconds in phases.seconds.items()}
    if micro_batches > 1:
        walk(update.average, times, ranks)


def _sum_over_ranks(step: Step, times: Times, ranks: Ranks) -> None:
    """The norms of what ranks hold in pieces are added up over them."""
    placements = [placed.placements for placed in step.inputs if placed.item.role is InputRole.PARAMETER]
    split = {
        tuple(axis for axis, where in zip(step.mesh.names, along, strict=True) if isinstance(where, Shard))
        for along in placements
    }
    for axes in sorted(split):
        for axis in axes:
            seconds = times.collectives.seconds("all_reduce", _SUM_BYTES, axis)
            ended = ranks.exchange(axis, seconds, ranks.now, f"all_reduce {axis}", bytes=_SUM_BYTES)
            ranks.wait(axis, ended, f"all_reduce {axis}")


@dataclass(frozen=True)
class _Account:
    """Where ranks stood when their passes were over."""

    ended: Seconds
    computed: Seconds
    exposed: Mapping[str, Seconds]

    def told(self, ranks: Ranks, rank: int, peak: Peak) -> RankTold:
        compute = ranks.of(rank, self.computed)
        exposed = {axis: ranks.of(rank, seconds) for axis, seconds in self.exposed.items()}
        ended = ranks.of(rank, self.ended)
        return RankTold(
            ranks=ranks.alike(rank),
            compute_s=compute,
            exposed_s=exposed,
            bubble_s=0.0,
            update_s=ranks.of(rank, ranks.now) - ended,
            launch_s=max(0.0, ended - compute - sum(exposed.values())),
            handed_bytes=dict(ranks.handed_bytes),
            peak=peak,
        )
