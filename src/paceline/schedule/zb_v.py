"""ZB-V: two stages per rank, down and up again, so that the loss comes back to the rank where the batch went in.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, 2024, section 6. Where F, I and W take the same time no
rank waits between its first and its last action, at the memory of 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.schedule.actions import Action, Op, Schedule
from paceline.schedule.places import v_shape

_F, _I, _W = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """Return the schedule.

    Its order wants `2 * ranks - 1` micro-batches or more. With fewer it is the order of that many, without those that
    are not there: micro-batches do not depend on each other.
    """
    whole = padded(ranks, micro_batches)
    actions = tuple(
        tuple(action for action in _order(rank, ranks, whole) if action.micro_batch < micro_batches)
        for rank in range(ranks)
    )
    return Schedule("zb-v", micro_batches, v_shape(ranks), actions)


def padded(ranks: int, micro_batches: int) -> int:
    """Return for how many micro-batches the order is made."""
    return max(2 * ranks - 1, micro_batches)


@dataclass
class _Chunk:
    """One of the two stages of a rank, and how many micro-batches have been through each part of it."""

    stage: int
    done: dict[Op, int] = field(default_factory=lambda: {op: 0 for op in (_F, _I, _W)})

    def next(self, *ops: Op) -> Iterator[Action]:
        for op in ops:
            yield Action(op, self.stage, self.done[op])
            self.done[op] += 1


def _order(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    down, up = _Chunk(rank), _Chunk(2 * ranks - 1 - rank)
    # Fill: downwards until the first micro-batch comes back up, then both ways, then the first gradients.
    for _ in range(2 * (ranks - rank) - 1):
        yield from down.next(_F)
    for _ in range(rank):
        yield from up.next(_F)
        yield from down.next(_F)
    for _ in range(ranks - rank):
        yield from up.next(_F, _I, _W)
    # Steady: each of the two stages takes one micro-batch forward and one back.
    while up.done[_F] < micro_batches:
        if down.done[_F] < micro_batches:
            yield from down.next(_F)
        yield from down.next(_I, _W)
        yield from up.next(_F, _I, _W)
    # Drain: what others wait for first, then the weight gradients that were left.
    for _ in range(rank):
        yield from down.next(_I)
        yield from up.next(_I)
    for _ in range(ranks - rank):
        yield from down.next(_I, _W)
    for chunk in (up, down):
        while chunk.done[_W] < micro_batches:
            yield from chunk.next(_W)
