"""Where stages lie: which pipeline ranks compute each of them, and how many micro-batches they hold at once."""

from __future__ import annotations

from collections.abc import Sequence

Replicas = tuple[tuple[int, ...], ...]


def one_each(ranks: int) -> Replicas:
    """Return stage `s` on rank `s`."""
    return tuple((rank,) for rank in range(ranks))


def round_robin(ranks: int, chunks: int) -> Replicas:
    """Return `ranks * chunks` stages dealt out in turns: stage `s` on rank `s % ranks`."""
    return tuple((stage % ranks,) for stage in range(ranks * chunks))


def v_shape(ranks: int) -> Replicas:
    """Return two stages per rank, down and up again: the first and the last stage lie on rank 0."""
    return tuple((rank,) for rank in [*range(ranks), *reversed(range(ranks))])


def consecutive(counts: Sequence[int]) -> Replicas:
    """Return stages of so many ranks each, `[2, 1]` as `((0, 1), (2,))`."""
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


def depths(replicas: Replicas) -> tuple[int, ...]:
    """Return for each stage how many micro-batches each of its ranks has in flight under 1F1B.

    PipeDream's NOAM (Narayanan et al. 2019, section 3.2), for every stage: the ranks from it to the end, divided by its
    own, rounded up. With one rank for each stage, stage `s` of `S` has `S - s`.
    """
    ranks = [len(of_stage) for of_stage in replicas]
    return tuple(-(-sum(ranks[stage:]) // ranks[stage]) for stage in range(len(ranks)))
