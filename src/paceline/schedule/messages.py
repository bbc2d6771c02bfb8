"""The pass that adds messages between ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace

from paceline.errors import ScheduleError
from paceline.schedule.actions import Action, Edges, Op, Payload, Schedule, payload_of

# A message from one rank to another: source and target stage, and the micro-batch.
_Message = tuple[int, int, int]
_Channels = dict[tuple[int, int, Payload], deque[_Message]]


def communicate(schedule: Schedule, edges: Edges) -> Schedule:
    """Return the schedule with a SEND right after each value is made and a RECV right before it is read.

    Stages of one rank hand values over without messages. Transports without tags match messages by their order, so each
    directed pair of ranks is first in, first out for each payload: where an edge skips stages, a message that was sent
    before the one that is needed is received before it too. That adds no wait, since it is there already.

    Raises:
        ScheduleError: the schedule has messages already.
    """
    if schedule.has_messages:
        raise ScheduleError("this schedule has messages already; validate it as it is, or leave out its SEND and RECV.")
    sending = [list(_with_sends(schedule, edges, actions)) for actions in schedule.actions]
    channels: _Channels = defaultdict(deque)
    for rank, actions in enumerate(sending):
        for action in actions:
            if action.op is Op.SEND:
                assert action.payload is not None and action.peer is not None
                channel = rank, schedule.rank_of(action.peer, action.micro_batch), action.payload
                channels[channel].append((action.stage, action.peer, action.micro_batch))
    complete = (tuple(_with_receives(schedule, edges, channels, rank, actions)) for rank, actions in enumerate(sending))
    return replace(schedule, actions=tuple(complete))


def _with_sends(schedule: Schedule, edges: Edges, actions: tuple[Action, ...]) -> Iterator[Action]:
    for action in actions:
        yield action
        stage, index = action.stage, action.micro_batch
        for target in edges.targets(action.op, stage):
            if schedule.rank_of(target, index) != schedule.rank_of(stage, index):
                yield Action(Op.SEND, stage, index, payload=payload_of(action.op), peer=target)


def _with_receives(
    schedule: Schedule, edges: Edges, channels: _Channels, rank: int, actions: list[Action]
) -> Iterator[Action]:
    received: set[tuple[Payload, _Message]] = set()
    for action in actions:
        payload = payload_of(action.op)
        for source in edges.sources(action.op, action.stage):
            assert payload is not None
            sender = schedule.rank_of(source, action.micro_batch)
            needed = payload, (source, action.stage, action.micro_batch)
            queue = channels[sender, rank, payload]
            while sender != rank and needed not in received and queue:
                message = queue.popleft()
                received.add((payload, message))
                made, read, index = message
                yield Action(Op.RECEIVE, read, index, payload=payload, peer=made)
        yield action
