"""Forward passes only, for validation."""

from __future__ import annotations

from paceline.schedule.actions import Action, Op, Schedule
from paceline.schedule.places import Replicas


def evaluation(replicas: Replicas, micro_batches: int) -> Schedule:
    """Return the schedule for stages that lie where training put them.

    Groups of as many micro-batches as there are ranks go through one stage after the other. All ranks follow one order
    of everything, in which each stage comes after those before it, so they cannot wait for each other in a circle.
    """
    ranks = 1 + max(rank for of_stage in replicas for rank in of_stage)
    group = range(0, micro_batches, ranks)
    order = [
        (stage, index)
        for start in group
        for stage in range(len(replicas))
        for index in range(start, min(start + ranks, micro_batches))
    ]
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    for stage, index in order:
        of_stage = replicas[stage]
        lists[of_stage[index % len(of_stage)]].append(Action(Op.FORWARD, stage, index))
    return Schedule("evaluation", micro_batches, replicas, tuple(map(tuple, lists)))
