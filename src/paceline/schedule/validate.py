"""Proves a schedule right, and accounts for what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.schedule import clock, memory
from paceline.schedule.actions import Edges, Op, Schedule
from paceline.schedule.clock import Span
from paceline.schedule.rules import check


@dataclass(frozen=True)
class Account:
    """What a schedule takes.

    Attributes:
        makespan: from the first action to the end of the last one, in the units of the durations.
        busy: how long each rank computes.
        bubble: the share of all ranks' time, from 0 to `makespan`, in which they do not compute.
        stall: the largest share of a rank's own time, from its first to its last computation, in which it waits. This
            is what the papers on zero bubble count: ranks that begin later end later, and the next step follows on.
        stage_peaks: the most micro-batches that a rank of each stage has in flight at once.
        rank_peaks: the same over all stages of each rank.
        stage_versions: how many versions of its weights a rank of each stage keeps at once, at most.
        messages: how many are sent between ranks.
        times: start and end of each action, by rank and position.
    """

    makespan: float
    busy: tuple[float, ...]
    bubble: float
    stall: float
    stage_peaks: tuple[int, ...]
    rank_peaks: tuple[int, ...]
    stage_versions: tuple[int, ...]
    messages: int
    times: tuple[tuple[Span, ...], ...]


def validate(
    schedule: Schedule,
    edges: Edges,
    durations: Mapping[tuple[Op, int], float] | None = None,
    latency: float = 0.0,
) -> Account:
    """Prove a schedule with messages complete, in order and free of deadlock, and return what it takes.

    Each micro-batch goes once through each stage, forward and, unless none does, backward; nothing is read before it is
    there; versions exist when they are read, and B, I and W read that of their F; every gradient is reduced and
    applied; messages are first in, first out for each directed pair of ranks and payload.

    Args:
        schedule: with its messages.
        edges: between which stages values move.
        durations: of an action of a stage; F, I and W take 1 and B takes 2 where it says nothing.
        latency: between SEND and the earliest end of its RECV.

    Raises:
        ScheduleError: the schedule is wrong; the message names the rank, the position in its list, and the action.
    """
    check(schedule, edges)
    times = clock.run(schedule, durations, latency)
    stage_peaks, rank_peaks = memory.peaks(schedule)
    spans = [
        [span for action, span in zip(actions, of_rank, strict=True) if action.op.is_compute]
        for actions, of_rank in zip(schedule.actions, times, strict=True)
    ]
    busy = tuple(sum(end - start for start, end in of_rank) for of_rank in spans)
    makespan = max(end for of_rank in times for _, end in of_rank)
    return Account(
        makespan=makespan,
        busy=busy,
        bubble=_lost(sum(busy), schedule.ranks * makespan),
        stall=max(_lost(b, of_rank[-1][1] - of_rank[0][0]) for b, of_rank in zip(busy, spans, strict=True)),
        stage_peaks=stage_peaks,
        rank_peaks=rank_peaks,
        stage_versions=memory.versions(schedule),
        messages=sum(action.op is Op.SEND for action in schedule.everything()),
        times=times,
    )


def _lost(used: float, whole: float) -> float:
    """Return the share of a time that is not used."""
    return 1 - used / whole if whole else 0.0
