"""One step of a mesh with stages in virtual time: the schedule that runs, with the durations of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.plan import Mesh, Plan
from paceline.runtime.pipeline.scheduling import Schedules, edges_of
from paceline.runtime.pipeline.step import PipelineStep
from paceline.schedule import Action, Op, Schedule, clock
from paceline.schedule.clock import Span
from paceline.simulator.placed.memory import Peak
from paceline.simulator.placed.pipeline_memory import peaks_of_pipeline
from paceline.simulator.placed.pipeline_parts import (
    PP,
    Edge,
    Part,
    Walked,
    message_bytes,
    trained_on,
    walked,
    walked_parts,
)
from paceline.simulator.placed.simulation import RankTold, Simulation
from paceline.simulator.placed.step import Circumstances
from paceline.simulator.placed.times import Times
from paceline.simulator.placed.update import Update, update_of
from paceline.trace import GRADIENTS, NORM, UPDATE, Category, Event

__all__ = ["simulate_pipeline", "trained_on"]

_SUM_BYTES = 8
_LOSS_BYTES = 32
_DETAILED = 2
"""Micro-batches whose single calls are noted."""


def simulate_pipeline(
    step: PipelineStep, plan: Plan, micro_batches: int, times: Times, given: Circumstances | None = None
) -> Simulation:
    """Return what a step of a pipeline comes to.

    Args:
        step: the stages, as ranks run them.
        plan: that they were placed by.
        micro_batches: that flow through them in a step.
        times: how long calls and collectives take.
        given: what it depends on beside; its micro-batches are not looked at.
    """
    return _Pipeline(step, plan, micro_batches, times, given or Circumstances()).simulated()


@dataclass
class _Pipeline:
    step: PipelineStep
    plan: Plan
    micro_batches: int
    times: Times
    given: Circumstances
    _ends: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schedules = Schedules(self.plan.pipeline, self.plan.mesh.stage_ranks)
        self.schedule: Schedule = schedules.training(self.micro_batches, edges_of(self.step.pipeline))
        self.updates: list[Update] = [
            update_of(
                list(trained_on(self.step, self.schedule.stages_of(rank)).values()),
                self.given.optimizer,
                clips=self.given.clips,
            )
            for rank in range(self.schedule.ranks)
        ]
        sums = [
            update_of(list(trained_on(self.step, [stage.index]).values()), self.given.optimizer).add
            for stage in self.step.pipeline.stages
        ]
        self.parts: dict[Part, Walked] = walked_parts(self.step, self.plan, self.times, sums)
        self.bytes: dict[Edge, int] = message_bytes(self.step, self.plan)
        self.messages = {edge: self._collective("send", nbytes, PP) for edge, nbytes in self.bytes.items()}
        self.slowness = self._slowness()

    def simulated(self) -> Simulation:
        durations = {part: found.seconds for part, found in self.parts.items()}
        durations |= self._between_replicas()
        spans = clock.run(self.schedule, durations, messages=self.messages, slowness=self.slowness)
        ended = max(end for of_rank in spans for _, end in of_rank)
        events = [event for rank in self._watched() for event in self._events(rank, spans[rank])]
        step_s = self._tail(ended, events) + self.times.constant_s
        peaks = peaks_of_pipeline(self.step, self.plan, self.schedule, self.updates, self.times, self.given.workspaces)
        return Simulation(
            plan=self.plan,
            step_s=step_s,
            micro_batches=self.micro_batches,
            ranks=tuple(self._told(rank, spans[rank], step_s, peak) for rank, peak in enumerate(peaks)),
            source=self.times.source,
            events=tuple(events),
            phases={"passes": ended, **{name: seconds for name, seconds in self._longest.items()}},
        )

    def _collective(self, kind: str, nbytes: int, axis: str) -> float:
        return self.times.collectives.seconds(kind, nbytes, axis)

    def _slowness(self) -> dict[int, float]:
        """By pipeline rank: the slowest rank of the inner mesh holds back the others."""
        found: dict[int, float] = {}
        for rank, factor in self.given.slowness.items():
            number, _ = self.plan.mesh.split_rank(rank)
            found[number] = max(found.get(number, 1.0), factor)
        return found

    def _between_replicas(self) -> dict[Part, float]:
        """What ranks of a stage with several take to add up their gradients, and to update them within a schedule."""
        found: dict[Part, float] = {}
        for stage, ranks in enumerate(self.schedule.replicas):
            nbytes = sum(piece.nbytes for piece in trained_on(self.step, [stage]).values())
            others = len(ranks) - 1
            found[Op.REDUCE, stage] = others * self._collective("send", nbytes, PP) if others else 0.0
            if self.schedule.is_asynchronous:
                update = self.updates[ranks[0]]
                found[Op.UPDATE, stage] = walked([update.step], self.step.mesh, self.times).seconds
        return found

    def _watched(self) -> Sequence[int]:
        """The pipeline ranks whose events are noted."""
        if self.given.watched is None:
            return range(self.schedule.ranks)
        return sorted({self.plan.mesh.split_rank(rank)[0] for rank in self.given.watched})

    def _first(self, number: int) -> int:
        """The first rank of the mesh that stands at a place of the pipeline."""
        return _ranks_at(self.plan.mesh, number)[0]

    def _events(self, number: int, spans: Sequence[Span]) -> list[Event]:
        rank = self._first(number)
        found = []
        for action, (began, ended) in zip(self.schedule.actions[number], spans, strict=True):
            found.append(Event(str(action), Category.PHASE, rank, began, ended))
            part = self.parts.get((action.op, action.stage))
            if part is not None and action.micro_batch < _DETAILED:
                slow = self.slowness.get(number, 1.0)
                found += [
                    Event(e.name, e.category, rank, began + slow * e.began_s, began + slow * e.ended_s, e.arguments)
                    for e in part.events
                ]
        return found

    def _tail(self, ended: float, events: list[Event]) -> float:
        """What follows the passes: all ranks meet for the loss, sum gradients, meet for their norm, and update."""
        self._longest: dict[str, float] = {}
        if self.schedule.is_asynchronous:
            return ended
        now = ended
        for name, meeting in ((GRADIENTS, _LOSS_BYTES), (NORM, _SUM_BYTES), (UPDATE, 0)):
            taken = [self._slow(rank, self._tail_part(name, rank)) for rank in range(self.schedule.ranks)]
            meets = self._collective("all_reduce", meeting, PP) if meeting else 0.0
            for rank in self._watched():
                events.append(Event(name, Category.PHASE, self._first(rank), now, now + meets + taken[rank]))
            self._longest[name] = meets + max(taken)
            now += self._longest[name]
        return now

    def _slow(self, number: int, seconds: float) -> float:
        return seconds * self.slowness.get(number, 1.0)

    def _tail_part(self, name: str, number: int) -> float:
        update = self.updates[number]
        if name == GRADIENTS:
            return self._sums(number).seconds
        return walked([update.norm if name == NORM else update.step], self.step.mesh, self.times).seconds

    def _sums(self, number: int) -> Walked:
        """The sums of gradients over the inner mesh, and over the stages that share a tied parameter."""
        stages = self.schedule.stages_of(number)
        found = walked(
            [reduction.graph for stage in stages if (reduction := self.step.reductions[stage]) is not None],
            self.step.mesh,
            self.times,
        )
        tied = sum(self._collective("send", nbytes, PP) for nbytes in self._tied(number))
        exposed = {**found.exposed_s, PP: tied} if tied else found.exposed_s
        return Walked(found.seconds + tied, found.compute_s, exposed, found.handed_bytes)

    def _tied(self, number: int) -> list[int]:
        """Bytes of what a rank sends of the parameters that stages on other ranks use too."""
        mine = trained_on(self.step, self.schedule.stages_of(number))
        others = [
            set(trained_on(self.step, self.schedule.stages_of(other)))
            for other in range(self.schedule.ranks)
            if other != number and not set(self.schedule.stages_of(other)) & set(self.schedule.stages_of(number))
        ]
        return [piece.nbytes for name, piece in mine.items() for held in others if name in held]

    def _told(self, number: int, spans: Sequence[Span], step_s: float, peak: Peak) -> RankTold:
        compute = launch = 0.0
        exposed: dict[str, float] = {}
        handed: dict[str, int] = {}
        before = 0.0
        for action, (began, ended) in zip(self.schedule.actions[number], spans, strict=True):
            part = self.parts.get((action.op, action.stage))
            if part is not None:
                compute += self._slow(number, part.compute_s)
                launch += self._slow(number, part.launch_s)
                _add(exposed, part.exposed_s)
                _add(handed, part.handed_bytes)
            elif action.op is Op.RECEIVE:
                _add(exposed, {PP: min(began - before, self.messages.get(_edge(action), 0.0))})
            elif action.op is Op.SEND:
                _add(handed, {PP: self.bytes.get(_edge(action), 0)})
            before = ended
        sums = self._sums(number)
        if not self.schedule.is_asynchronous:
            _add(exposed, sums.exposed_s)
            _add(handed, sums.handed_bytes)
        update = 0.0 if self.schedule.is_asynchronous else sum(self._tail_part(n, number) for n in (NORM, UPDATE))
        waits = step_s - compute - launch - sum(exposed.values()) - self._slow(number, update + sums.compute_s)
        return RankTold(
            ranks=tuple(_ranks_at(self.plan.mesh, number)),
            compute_s=compute,
            exposed_s=exposed,
            bubble_s=max(0.0, waits - self.times.constant_s),
            update_s=self._slow(number, update),
            launch_s=launch,
            handed_bytes=handed,
            peak=peak,
        )


def _add(totals: dict[str, float] | dict[str, int], more: Mapping[str, float] | Mapping[str, int]) -> None:
    for key, value in more.items():
        totals[key] = totals.get(key, 0) + value  # type: ignore[assignment]  # both of one type


def _edge(action: Action) -> Edge:
    assert action.payload is not None and action.peer is not None
    ends = (action.stage, action.peer) if action.op is Op.SEND else (action.peer, action.stage)
    return (action.payload, *ends)


def _ranks_at(mesh: Mesh, number: int) -> list[int]:
    """The ranks of a mesh that stand at one place of the pipeline."""
    return [rank for rank in range(mesh.size) if mesh.split_rank(rank)[0] == number]
