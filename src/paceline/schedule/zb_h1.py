"""ZB-H1: 1F1B whose backward pass is cut in two; weight gradients, which nobody waits for, fill what was idle.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.schedule.actions import Action, Op, Schedule
from paceline.schedule.places import one_each


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """Return the schedule; no rank holds more micro-batches than the first one does under 1F1B."""
    actions = tuple(tuple(_order(rank, ranks, micro_batches)) for rank in range(ranks))
    return Schedule("zb-h1", micro_batches, one_each(ranks), actions)


def _order(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """Yield 1F1B's order, with weight gradients `rank` micro-batches behind: later ranks hold fewer forward passes."""
    warm_up = min(ranks - 1 - rank, micro_batches)
    for index in range(warm_up):
        yield Action(Op.FORWARD, rank, index)
    for index in range(micro_batches):
        if warm_up + index < micro_batches:
            yield Action(Op.FORWARD, rank, warm_up + index)
        yield Action(Op.BACKWARD_INPUT, rank, index)
        if index >= rank:
            yield Action(Op.BACKWARD_WEIGHT, rank, index - rank)
    for index in range(max(micro_batches - rank, 0), micro_batches):
        yield Action(Op.BACKWARD_WEIGHT, rank, index)
