"""How micro-batches flow through a pipeline, at a cost that does not grow with their number.

A schedule repeats itself between its filling and its draining. Enough micro-batches are walked to see it: what happens
happens again some micro-batches later, on every rank the same time later. Each start is the latest of some earlier
ends, so it then goes on like that until the pipeline drains, and the rest follows from the period.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.schedule import Edges, Kind, Op, Schedule, communicate, make
from paceline.schedule.clock import Span, run

Numbers = NDArray[np.float64]
Durations = Mapping[tuple[Op, int], float]

_SAME = 1e-9
"""Times that differ by a smaller share are the same: sums of equal terms in another order."""
_COMPUTING = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Pipeline:
    """What flows through what.

    Attributes:
        kind: of the schedule, one that drains after each batch.
        ranks: of the pipeline.
        chunks: stages on each rank.
        durations: seconds of the actions of each stage.
        latency: seconds between the end of a SEND and the earliest one of its RECV.
    """

    kind: Kind
    ranks: int
    chunks: int
    durations: Durations
    latency: float = 0.0

    @property
    def in_flight(self) -> int:
        """Micro-batches of which a rank may do something before it is through with an earlier one, at most."""
        return {Kind.ZB_H1: 2, Kind.ZB_V: 3, Kind.INTERLEAVED: 3}.get(self.kind, 1) * self.ranks

    @property
    def step(self) -> int:
        """Micro-batches after which its order repeats itself."""
        return self.ranks if self.kind is Kind.INTERLEAVED else 1

    def schedule(self, micro_batches: int) -> Schedule:
        """Return what its ranks do, with messages."""
        return _schedule(self.kind, self.ranks, self.chunks, micro_batches)

    def walk(self, micro_batches: int) -> Walk:
        """Run all of them."""
        schedule = self.schedule(micro_batches)
        return Walk(schedule, run(schedule, self.durations, self.latency))


@lru_cache(maxsize=32)
def _schedule(kind: Kind, ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Return what ranks do, with messages; layouts that are compared often share it, and it takes longest to make."""
    plain = make(kind.value, ranks, micro_batches, chunks=chunks)
    return communicate(plain, Edges.chain(plain.stages))


@dataclass(frozen=True)
class Walk:
    """A schedule that ran in virtual time."""

    schedule: Schedule
    times: tuple[tuple[Span, ...], ...]

    @cached_property
    def ends(self) -> Numbers:
        """When each computation ends: kinds of computation that occur, stages, micro-batches."""
        ops = [op for op in _COMPUTING if any(action.op is op for action in self.schedule.everything())]
        found = np.full((len(ops), self.schedule.stages, self.schedule.micro_batches), np.nan)
        for actions, spans in zip(self.schedule.actions, self.times, strict=True):
            for action, (_, end) in zip(actions, spans, strict=True):
                if action.op in ops:
                    found[ops.index(action.op), action.stage, action.micro_batch] = end
        return found

    def period(self, in_flight: int, step: int) -> tuple[int, float] | None:
        """Return after how many micro-batches, and seconds, everything happens again; None where that is not seen."""
        ends = self.ends
        until = ends.shape[-1] - in_flight  # draining has no influence before
        for period in range(step, until, step):
            since = until - max(period, in_flight)
            if since < period:
                return None
            later = ends[..., since:until] - ends[..., since - period : until - period]
            if np.ptp(later) <= _SAME * ends.max():
                return period, float(later.mean())
        return None


@dataclass(frozen=True)
class Flow:
    """How a batch flows through a pipeline.

    Attributes:
        pipeline: through which.
        micro_batches: of the batch.
        last_began, last_ended: of each stage, the last action that makes gradients of its parameters.
        ended: of each rank, its last computation.
        pace_s: seconds for each further micro-batch.
        walked: what was walked to know it.
    """

    pipeline: Pipeline
    micro_batches: int
    last_began: Numbers
    last_ended: Numbers
    ended: Numbers
    pace_s: float
    walked: Walk

    @property
    def actions(self) -> int:
        """How many actions were walked."""
        return sum(map(len, self.walked.schedule.actions))

    def peak(self, held: Sequence[float]) -> Numbers:
        """Return the most that each rank holds at once.

        Args:
            held: of each stage, for a micro-batch from its forward pass to its gradients.
        """
        schedule = self.walked.schedule
        if self.pipeline.kind is Kind.GPIPE:  # holds all of them, however many
            of_ranks = [sum(held[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.ranks)]
            return self.micro_batches * np.array(of_ranks)
        found = np.zeros(schedule.ranks)
        for rank, actions in enumerate(schedule.actions):
            now = 0.0
            for action in actions:
                if action.op is Op.FORWARD:
                    now += held[action.stage]
                    found[rank] = max(found[rank], now)
                elif action.op.makes_gradients:
                    now -= held[action.stage]
        return found

    def at_latest(self, others: Sequence[Flow]) -> Flow:
        """Return it with the latest ends of any; others are of other replicas."""
        last_began, last_ended, ended = (
            np.max([getattr(each, name) for each in (self, *others)], axis=0)
            for name in ("last_began", "last_ended", "ended")
        )
        return replace(self, last_began=last_began, last_ended=last_ended, ended=ended)

    def later(self, micro_batches: int, seconds: float | Numbers, of_ranks: float | Numbers) -> Flow:
        """Return it with more micro-batches, its stages and ranks so many seconds later."""
        return replace(
            self,
            micro_batches=self.micro_batches + micro_batches,
            last_began=self.last_began + seconds,
            last_ended=self.last_ended + seconds,
            ended=self.ended + of_ranks,
        )


def flow(pipeline: Pipeline, micro_batches: int) -> Flow:
    """Return how a batch of so many micro-batches flows through a pipeline."""
    durations = tuple(pipeline.durations.items())
    return _flow(pipeline.kind, pipeline.ranks, pipeline.chunks, durations, pipeline.latency, micro_batches)


@lru_cache(maxsize=16)
def _flow(
    kind: Kind,
    ranks: int,
    chunks: int,
    durations: tuple[tuple[tuple[Op, int], float], ...],
    latency: float,
    micro_batches: int,
) -> Flow:
    """Return the flow, once for all layouts that differ in their replicas alone."""
    pipeline = Pipeline(kind, ranks, chunks, dict(durations), latency)
    if pipeline.kind in (Kind.NAIVE, Kind.GPIPE):
        return _straight(pipeline, micro_batches)
    in_flight, step = pipeline.in_flight, pipeline.step
    count = 2 * in_flight + 2 * pipeline.ranks  # to fill, to see a period against what is in flight, and to drain
    # Periods mostly divide by the number of ranks: then the first walk ends as the batch does.
    while (count := count + (micro_batches - count) % (step * pipeline.ranks)) < micro_batches:
        walk = pipeline.walk(count)
        found = walk.period(in_flight, step)
        if found is not None:
            period, seconds = found
            periods, rest = divmod(micro_batches - count, period)
            walked = _of(pipeline, pipeline.walk(count + rest) if rest else walk, seconds / period)
            return walked.later(periods * period, periods * seconds, periods * seconds)
        count *= 2
    return _of(pipeline, pipeline.walk(micro_batches), 0.0)


def _straight(pipeline: Pipeline, micro_batches: int) -> Flow:
    """Return the flow where each further micro-batch takes as long as any other: nothing comes back before the end."""
    if micro_batches <= 2:
        return _of(pipeline, pipeline.walk(micro_batches), 0.0)
    less, more = (_of(pipeline, pipeline.walk(count), 0.0) for count in (1, 2))
    rest = micro_batches - 2
    of_stages, of_ranks = more.last_ended - less.last_ended, more.ended - less.ended
    paced = replace(more, pace_s=float(of_ranks.max()))
    return paced.later(rest, rest * of_stages, rest * of_ranks)


def _of(pipeline: Pipeline, walk: Walk, pace_s: float) -> Flow:
    schedule = walk.schedule
    began, ended, ranks = np.zeros(schedule.stages), np.zeros(schedule.stages), np.zeros(schedule.ranks)
    for rank, (actions, spans) in enumerate(zip(schedule.actions, walk.times, strict=True)):
        for action, (start, end) in zip(actions, spans, strict=True):
            if action.op.makes_gradients:
                began[action.stage], ended[action.stage] = start, end
            if action.op.is_compute:
                ranks[rank] = end
    return Flow(pipeline, schedule.micro_batches, began, ended, ranks, pace_s, walk)
