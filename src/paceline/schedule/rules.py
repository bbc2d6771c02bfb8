"""What can be seen wrong without running a schedule: form, completeness, and the order of actions and messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from paceline.errors import ScheduleError
from paceline.schedule.actions import Action, Edges, Op, Payload, Schedule
from paceline.schedule.rank_rules import check_rank, fault

# Where an action stands: rank, and position in its list from 0.
_Places = dict[Action, tuple[int, int]]
_GRADIENTS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def check(schedule: Schedule, edges: Edges) -> None:
    """Hold a schedule to all that does not depend on when ranks run.

    Raises:
        ScheduleError: something is wrong; the first fault, with its rank, position and action.
    """
    for source, target in sorted(edges.forward | edges.backward):
        if max(source, target) >= schedule.stages:
            raise ScheduleError(f"the edge ({source}, {target}) is of no stage: there are {schedule.stages}.")
    places = _places(schedule, edges)
    _check_complete(schedule, edges, places)
    for rank in range(schedule.ranks):
        check_rank(schedule, edges, rank)
    _check_first_in_first_out(schedule)


def _places(schedule: Schedule, edges: Edges) -> _Places:
    """Return where each computation and message stands, versions aside; each may be there once."""
    places: _Places = {}
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            why = _form(schedule, edges, rank, action)
            if why is not None:
                raise fault(rank, position, action, why)
            if action.op in (Op.REDUCE, Op.UPDATE):
                continue
            key = _key(action)
            if key in places:
                raise fault(rank, position, action, f"it is there already, as action {places[key][1]}")
            places[key] = rank, position
    return places


def _form(schedule: Schedule, edges: Edges, rank: int, action: Action) -> str | None:
    """Return what is wrong with an action taken alone, if anything."""
    if not 0 <= action.stage < schedule.stages:
        return f"there are {schedule.stages} stages, from 0"
    if not 0 <= action.micro_batch < schedule.micro_batches:
        return f"there are {schedule.micro_batches} micro-batches, from 0"
    if action.version < 0 or (action.version and not (action.op.is_compute or action.op is Op.UPDATE)):
        return f"its version is {action.version}; it is 0 or more, and 0 for what neither reads nor makes weights"
    if action.op in (Op.REDUCE, Op.UPDATE):
        if action.micro_batch:
            return "it is of a stage, not of a micro-batch: leave micro_batch 0"
        owners = schedule.replicas[action.stage]
    else:
        owners = (schedule.rank_of(action.stage, action.micro_batch),)
    if rank not in owners:
        return f"it belongs to rank {' or '.join(map(str, owners))}"
    if not action.op.is_message:
        return (
            None if action.payload is None and action.peer is None else "only SEND and RECV have a payload and a peer"
        )
    return _message_form(schedule, edges, rank, action)


def _message_form(schedule: Schedule, edges: Edges, rank: int, action: Action) -> str | None:
    if action.payload is None or action.peer is None:
        return "a message needs its payload and its peer, the stage at the other end"
    edge = (action.stage, action.peer) if action.op is Op.SEND else (action.peer, action.stage)
    if edge not in edges.of(action.payload):
        return f"there is no {'forward' if action.payload is Payload.ACTIVATION else 'backward'} edge {edge}"
    if schedule.rank_of(action.peer, action.micro_batch) == rank:
        return "stages of one rank hand values over without messages"
    return None


def _key(action: Action) -> Action:
    return Action(action.op, action.stage, action.micro_batch, payload=action.payload, peer=action.peer)


def _check_complete(schedule: Schedule, edges: Edges, places: _Places) -> None:
    for action in _expected(schedule, edges, places):
        if action not in places:
            rank = schedule.rank_of(action.stage, action.micro_batch)
            raise ScheduleError(f"rank {rank} lacks the action {action}.")
    for action, (rank, position) in places.items():
        if action.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
            whole = Action(Op.BACKWARD, action.stage, action.micro_batch)
            if whole in places:
                raise fault(rank, position, action, f"it is a part of the {whole}, action {places[whole][1]}")


def _expected(schedule: Schedule, edges: Edges, places: _Places) -> Iterator[Action]:
    trains = any(action.op in _GRADIENTS for action in places)
    for stage in range(schedule.stages):
        for index in range(schedule.micro_batches):
            yield Action(Op.FORWARD, stage, index)
            parts = [Action(op, stage, index) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
            if trains and any(part in places for part in parts):
                yield from parts
            elif trains:
                yield Action(Op.BACKWARD, stage, index)
    for payload in Payload if trains else (Payload.ACTIVATION,):
        for source, target in sorted(edges.of(payload)):
            for index in range(schedule.micro_batches):
                if schedule.rank_of(source, index) != schedule.rank_of(target, index):
                    yield Action(Op.SEND, source, index, payload=payload, peer=target)
                    yield Action(Op.RECEIVE, target, index, payload=payload, peer=source)


def _check_first_in_first_out(schedule: Schedule) -> None:
    """Hold receives to the order of sends, for each directed pair of ranks and payload."""
    sent: dict[tuple[int, int, Payload], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int, Payload], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            if action.payload is None or action.peer is None:
                continue
            other = schedule.rank_of(action.peer, action.micro_batch)
            if action.op is Op.SEND:
                sent[rank, other, action.payload].append(action)
            else:
                received[other, rank, action.payload].append((position, action))
    for channel, receives in received.items():
        source, target, _ = channel
        for send, (position, receive) in zip(sent[channel], receives, strict=True):
            if (send.peer, send.stage, send.micro_batch) != (receive.stage, receive.peer, receive.micro_batch):
                why = f"messages arrive in the order in which they were sent, and rank {source} sends first: {send}"
                raise fault(target, position, receive, why)
