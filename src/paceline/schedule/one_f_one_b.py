"""1F1B: each rank alternates between a forward and a backward pass as soon as it can.

Known as PipeDream-Flush: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, section 2.2.1. Replicated stages take micro-batches in turns, as in PipeDream's 1F1B-RR
(Narayanan et al., SOSP 2019, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.schedule.actions import Action, Op, Schedule
from paceline.schedule.places import Replicas, depths


def one_f_one_b(replicas: Replicas, micro_batches: int) -> Schedule:
    """Return the schedule of stages that have ranks of their own.

    No rank waits for itself in a circle: a stage may hold as many micro-batches as it has ranks, and those after it,
    so it has always sent on what the next one needs before that can give a gradient back.
    """
    lists = {
        rank: tuple(_alternate(stage, range(turn, micro_batches, len(ranks)), depth))
        for stage, (ranks, depth) in enumerate(zip(replicas, depths(replicas), strict=True))
        for turn, rank in enumerate(ranks)
    }
    return Schedule("1f1b", micro_batches, replicas, tuple(lists[rank] for rank in sorted(lists)))


def _alternate(stage: int, micro_batches: Sequence[int], depth: int) -> Iterator[Action]:
    """Yield forward and backward passes in turns, the forward passes `depth - 1` ahead."""
    warm_up = min(depth - 1, len(micro_batches))
    for index in micro_batches[:warm_up]:
        yield Action(Op.FORWARD, stage, index)
    for position, index in enumerate(micro_batches):
        if warm_up + position < len(micro_batches):
            yield Action(Op.FORWARD, stage, micro_batches[warm_up + position])
        yield Action(Op.BACKWARD, stage, index)
