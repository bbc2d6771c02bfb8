"""Interleaved 1F1B: each rank has several smaller stages, so a pipeline fills and drains in smaller steps.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.schedule.actions import Action, Op, Schedule
from paceline.schedule.places import round_robin


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Return Megatron's order, which goes through the chunks with as many micro-batches at a time as there are ranks.

    It wants micro-batches in groups of `ranks`. If they do not divide, the order is that of full groups, without the
    micro-batches that are not there. It stays an order: micro-batches do not depend on each other.
    """
    whole = padded(ranks, micro_batches)
    actions = tuple(
        tuple(action for action in _order(rank, ranks, whole, chunks) if action.micro_batch < micro_batches)
        for rank in range(ranks)
    )
    return Schedule("interleaved", micro_batches, round_robin(ranks, chunks), actions)


def padded(ranks: int, micro_batches: int) -> int:
    """Return the micro-batches of whole groups."""
    return -(-micro_batches // ranks) * ranks


def _order(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    count = micro_batches * chunks
    warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, count)
    for turn in range(warm_up):
        yield _pass(Op.FORWARD, turn, rank, ranks, chunks)
    for turn in range(count):
        if warm_up + turn < count:
            yield _pass(Op.FORWARD, warm_up + turn, rank, ranks, chunks)
        yield _pass(Op.BACKWARD, turn, rank, ranks, chunks)


def _pass(op: Op, turn: int, rank: int, ranks: int, chunks: int) -> Action:
    """Return the `turn`-th forward or backward pass of a rank; backward passes take the chunks from the last one."""
    group, within = divmod(turn, ranks * chunks)
    chunk, member = divmod(within, ranks)
    if op is Op.BACKWARD:
        chunk = chunks - 1 - chunk
    return Action(op, chunk * ranks + rank, group * ranks + member)
