"""One micro-batch at a time through all stages: what model parallelism is without pipelining."""

from __future__ import annotations

from paceline.schedule.actions import Action, Op, Schedule
from paceline.schedule.places import one_each


def naive(ranks: int, micro_batches: int) -> Schedule:
    """Return the schedule in which one rank computes while all others wait."""
    actions = tuple(
        tuple(Action(op, rank, index) for index in range(micro_batches) for op in (Op.FORWARD, Op.BACKWARD))
        for rank in range(ranks)
    )
    return Schedule("naive", micro_batches, one_each(ranks), actions)
