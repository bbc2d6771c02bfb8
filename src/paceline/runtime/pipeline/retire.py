"""When a sender may let go of what it sent: as soon as a later message from the receiver tells that it has it.

Known before anything runs, from the lists alone. So nobody asks a transport whether a send is over, or waits for one
that is not.
"""

from __future__ import annotations

from paceline.runtime.pipeline.channels import Message
from paceline.schedule import Action, Op, Schedule


def message_of(action: Action) -> Message:
    """Return the message that a SEND or RECV is one end of."""
    assert action.payload is not None and action.peer is not None
    ends = (action.stage, action.peer) if action.op is Op.SEND else (action.peer, action.stage)
    return Message(action.payload, *ends, action.micro_batch)


def retirements(schedule: Schedule, rank: int) -> dict[int, list[Message]]:
    """Return, by position in the list of `rank`, the messages that their receivers have after that action.

    A message is received for certain when the receiver has sent something after it that has come here. What no
    later message tells of stays until the end.
    """
    places: dict[Message, tuple[int, int]] = {}  # where each message is received: rank and position
    sent_at: dict[Message, int] = {}
    for number, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            if action.op is Op.RECEIVE:
                places[message_of(action)] = (number, position)
            elif action.op is Op.SEND:
                sent_at[message_of(action)] = position
    waiting: dict[int, list[tuple[int, Message]]] = {}  # by receiver: where it receives what we sent it
    found: dict[int, list[Message]] = {}
    for position, action in enumerate(schedule.actions[rank]):
        if action.op is Op.SEND:
            receiver, where = places[message_of(action)]
            waiting.setdefault(receiver, []).append((where, message_of(action)))
        elif action.op is Op.RECEIVE:
            message = message_of(action)
            sender = schedule.rank_of(message.source, message.micro_batch)
            kept = []
            for where, sent in waiting.get(sender, []):
                if where < sent_at[message]:
                    found.setdefault(position, []).append(sent)
                else:
                    kept.append((where, sent))
            waiting[sender] = kept
    return found
