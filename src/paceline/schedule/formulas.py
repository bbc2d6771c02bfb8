"""What theory says of each kind of schedule, where every stage takes the same time and B = 2F, I = W = F.

Bubbles are shares of all ranks' time, from the first action of any rank to the last of any rank.
"""

from __future__ import annotations

from paceline.schedule.interleaved import padded
from paceline.schedule.kinds import Kind


def ideal_bubble(kind: Kind, ranks: int, micro_batches: int, *, chunks: int = 1, batches: int = 1) -> float:
    """Return the bubble: (P - 1) / (m + P - 1) for GPipe and 1F1B with P ranks and m micro-batches, and so on.

    It is exact, but for `interleaved` where micro-batches do not divide by ranks: there it is not exceeded.
    """
    # work and span: of one rank, and from first to last, in units of one rank's work on one micro-batch
    work: float = micro_batches * batches
    span: float
    match kind:
        case Kind.NAIVE:
            span = work * ranks
        case Kind.GPIPE | Kind.ONE_F_ONE_B | Kind.PIPEDREAM | Kind.PIPEDREAM_2BW:
            span = work + ranks - 1
        case Kind.INTERLEAVED:  # fills and drains with one of `chunks` parts
            span = padded(ranks, micro_batches) + (ranks - 1) / chunks
        case Kind.ZB_H1:  # a third of 1F1B's, more where not all ranks get busy
            span = work + (ranks - 1 + max(ranks - micro_batches, 0)) / 3
        case Kind.ZB_V:  # ranks begin half a forward pass apart
            span = work + (ranks - 1 + max(3 * ranks - 1 - 2 * micro_batches, 0)) / 6
    return 1 - work / span


def peak_activations(
    kind: Kind, ranks: int, micro_batches: int, *, chunks: int = 1, batches: int = 1
) -> tuple[int, ...]:
    """Return for each rank how many micro-batches its stages have in flight at once, at most.

    With several stages per rank each counts for itself, and holds the activations of a smaller stage.
    """
    every = micro_batches * batches
    match kind:
        case Kind.NAIVE:
            return (1,) * ranks
        case Kind.GPIPE:
            return (micro_batches,) * ranks
        case Kind.ONE_F_ONE_B | Kind.PIPEDREAM | Kind.PIPEDREAM_2BW:
            return tuple(min(every, ranks - rank) for rank in range(ranks))
        case Kind.INTERLEAVED:
            warm_up = (2 * (ranks - rank - 1) + (chunks - 1) * ranks for rank in range(ranks))
            return tuple(min(chunks * micro_batches, 1 + ahead) for ahead in warm_up)
        case Kind.ZB_H1:
            return (min(micro_batches, ranks),) * ranks
        case Kind.ZB_V:
            return (2 * min(micro_batches, ranks),) * ranks


def weight_versions(kind: Kind, ranks: int, micro_batches: int, *, batches: int = 1) -> tuple[int, ...]:
    """Return for each stage how many versions of its weights are kept at once, at most."""
    match kind:
        case Kind.PIPEDREAM:
            return tuple(min(micro_batches * batches, ranks - stage) for stage in range(ranks))
        case Kind.PIPEDREAM_2BW:
            return (min(batches, 2),) * ranks
        case _:
            return (1,) * ranks
