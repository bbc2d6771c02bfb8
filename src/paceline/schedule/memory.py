"""What a schedule makes ranks hold: activations in flight, and versions of weights."""

from __future__ import annotations

from collections import Counter

from paceline.schedule.actions import Op, Schedule


def peaks(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the most micro-batches in flight at once, on a rank of each stage and over all stages of each rank.

    A micro-batch is in flight on a stage from its F to the end of its B or W. On a rank with several stages each counts
    for itself, with the activations of a smaller stage.
    """
    of_stage: Counter[int] = Counter()
    of_rank: Counter[int] = Counter()
    for rank, actions in enumerate(schedule.actions):
        held: Counter[int] = Counter()
        for action in actions:
            if action.op is Op.FORWARD:
                held[action.stage] += 1
                of_stage[action.stage] = max(of_stage[action.stage], held[action.stage])
                of_rank[rank] = max(of_rank[rank], held.total())
            elif action.op.makes_gradients:
                held[action.stage] -= 1
    return tuple(of_stage[stage] for stage in range(schedule.stages)), tuple(of_rank[r] for r in range(schedule.ranks))


def versions(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage how many versions of its weights a rank keeps at once, at most.

    A version is kept while it is the newest, and after that until it has been read for the last time.
    """
    kept = [1] * schedule.stages
    for actions in schedule.actions:
        last_read = {(a.stage, a.version): position for position, a in enumerate(actions) if a.op.is_compute}
        for position, update in enumerate(actions):
            if update.op is Op.UPDATE:
                old = sum(last_read.get((update.stage, version), -1) > position for version in range(update.version))
                kept[update.stage] = max(kept[update.stage], 1 + old)
    return tuple(kept)
