"""A sender lets go of a message only when its receiver has it for certain, however fast or slow ranks are."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.runtime.pipeline.channels import Message
from paceline.runtime.pipeline.retire import message_of, retirements
from paceline.schedule import Edges, Op, Schedule, communicate, make

CASES = [
    (kind, ranks, micro_batches)
    for kind in ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream", "pipedream-2bw")
    for ranks, micro_batches in ((2, 2), (2, 5), (3, 4), (4, 8))
]


def scheduled(kind: str, ranks: int, micro_batches: int, *, skips: bool) -> Schedule:
    schedule = make(kind, ranks, micro_batches, chunks=2 if kind == "interleaved" else 1)
    edges = Edges.chain(schedule.stages)
    if skips and schedule.stages > 2:
        edges = Edges(edges.forward | {(0, schedule.stages - 1)}, edges.backward | {(schedule.stages - 1, 0)})
    return communicate(schedule, edges)


@pytest.mark.parametrize(("kind", "ranks", "micro_batches"), CASES)
@pytest.mark.parametrize("skips", [False, True])
def test_what_is_released_was_received(kind: str, ranks: int, micro_batches: int, skips: bool) -> None:
    schedule = scheduled(kind, ranks, micro_batches, skips=skips)
    retired = [retirements(schedule, rank) for rank in range(schedule.ranks)]
    for seed in range(3):
        _walk(schedule, retired, random.Random(seed))


def _walk(schedule: Schedule, retired: list[dict[int, list[Message]]], chance: random.Random) -> None:
    """Ranks go on in any order, one of them as late as it can."""
    at = [0] * schedule.ranks
    received: set[Message] = set()
    released: list[Message] = []
    sent: set[Message] = set()
    last = chance.randrange(schedule.ranks)
    while any(place < len(actions) for place, actions in zip(at, schedule.actions, strict=True)):
        able = [rank for rank in range(schedule.ranks) if _can(schedule, at, rank, sent)]
        assert able, "the ranks wait for each other"
        rank = chance.choice([r for r in able if r != last] or able)
        action = schedule.actions[rank][at[rank]]
        if action.op is Op.SEND:
            sent.add(message_of(action))
        elif action.op is Op.RECEIVE:
            received.add(message_of(action))
        for message in retired[rank].get(at[rank], ()):
            assert message in sent and message in received
            released.append(message)
        at[rank] += 1
    assert len(set(released)) == len(released), "released twice"


def _can(schedule: Schedule, at: list[int], rank: int, sent: set[Any]) -> bool:
    if at[rank] == len(schedule.actions[rank]):
        return False
    action = schedule.actions[rank][at[rank]]
    return action.op is not Op.RECEIVE or message_of(action) in sent


def test_few_messages_are_kept_under_1f1b() -> None:
    """Whoever talks back soon frees its peers: activations are let go of when their gradient comes."""
    schedule = scheduled("1f1b", 4, 16, skips=False)
    for rank in range(3):
        kept = most = 0
        found = retirements(schedule, rank)
        for position, action in enumerate(schedule.actions[rank]):
            kept += action.op is Op.SEND
            kept -= len(found.get(position, ()))
            most = max(most, kept)
        assert most <= 2 * (4 - rank) + 2
