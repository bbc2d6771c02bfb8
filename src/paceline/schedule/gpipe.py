"""GPipe: all forward passes, then all backward passes.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.
"""

from __future__ import annotations

from paceline.schedule.actions import Action, Op, Schedule
from paceline.schedule.places import one_each


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """Return the schedule; backward passes begin with the last micro-batch, as in figure 2c of the paper."""
    actions = tuple(
        (
            *(Action(Op.FORWARD, rank, index) for index in range(micro_batches)),
            *(Action(Op.BACKWARD, rank, index) for index in reversed(range(micro_batches))),
        )
        for rank in range(ranks)
    )
    return Schedule("gpipe", micro_batches, one_each(ranks), actions)
