"""Passes that say which weights are read, and when they are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from paceline.schedule.actions import Action, Op, Schedule


def read_versions(schedule: Schedule, version: Callable[[int, int], int]) -> Schedule:
    """Return the schedule in which each computation reads `version(stage, micro_batch)`."""
    return _with(
        schedule,
        [
            [replace(a, version=version(a.stage, a.micro_batch)) if a.op.is_compute else a for a in actions]
            for actions in schedule.actions
        ],
    )


def update_at_end(schedule: Schedule) -> Schedule:
    """Return the schedule with a flush: when a rank is done, all gradients are reduced and all its stages updated.

    Reductions come before updates and in order of stages, so ranks that share several stages meet in the same order.
    """
    return _with(
        schedule, [[*actions, *_flush(schedule.stages_of(rank))] for rank, actions in enumerate(schedule.actions)]
    )


def update_every(schedule: Schedule, micro_batches: int) -> Schedule:
    """Return the schedule in which a rank updates a stage after so many of its micro-batches have a gradient."""
    return _with(schedule, [list(_updating(actions, micro_batches)) for actions in schedule.actions])


def _flush(stages: tuple[int, ...]) -> Iterator[Action]:
    for stage in stages:
        yield Action(Op.REDUCE, stage)
    for stage in stages:
        yield Action(Op.UPDATE, stage, version=1)


def _updating(actions: tuple[Action, ...], micro_batches: int) -> Iterator[Action]:
    gradients: Counter[int] = Counter()
    for action in actions:
        yield action
        if action.op.makes_gradients:
            gradients[action.stage] += 1
            version, left = divmod(gradients[action.stage], micro_batches)
            if not left:
                yield Action(Op.REDUCE, action.stage)
                yield Action(Op.UPDATE, action.stage, version=version)


def _with(schedule: Schedule, lists: list[list[Action]]) -> Schedule:
    return replace(schedule, actions=tuple(map(tuple, lists)))
