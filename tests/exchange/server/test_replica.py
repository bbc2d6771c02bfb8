"""When an update is committed, by the replica's place in its chain."""

from __future__ import annotations

import torch

from paceline.exchange.job import DenseTable, Job
from paceline.exchange.server.entry import Entry
from paceline.exchange.server.place import Place, places
from paceline.exchange.server.replica import Replica
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Applied, Part, Update
from paceline.exchange.view import Move, View

HEAD = Place(True, False, successor=2)
ALONE = Place(True, True)
MOVE = Move(0, 1, 3, begun=4)
MOVING = Place(True, True, successor=3, outgoing=MOVE)


class Heard:
    def __init__(self) -> None:
        self.positions: list[int] = []
        self.reasons: list[str] = []

    def committed(self, shard: int, applied: Applied) -> None:
        self.positions.append(applied.position)

    def refused(self, why: str) -> None:
        self.reasons.append(why)


def shard(updates: int) -> Shard:
    made = Shard(Job((DenseTable("w", (4,)),), shards=1), 0)
    for task in range(updates):
        advance(made, task)
    return made


def advance(of: Shard, task: int) -> Applied:
    return of.apply(Update(1, task + 1, (task,), -1, 1.0, (Part(0, None, torch.ones(4)),)))


def push(replica: Replica, task: int, heard: Heard) -> None:
    applied = advance(replica.shard, task)
    if replica.hands_on:
        replica.outbox.append(Entry(0, applied.position, 1, task + 1, (task,), -1, 1.0, (), False))
    replica.settle()
    replica.wait(applied, heard)


def test_what_it_begins_with_is_committed():
    heard = Heard()
    replica = Replica(shard(3), HEAD)
    replica.wait(Applied(3, 0, True), heard)
    assert heard.positions == [3]


def test_a_head_waits_for_its_successor():
    heard = Heard()
    replica = Replica(shard(0), HEAD)
    push(replica, 0, heard)
    push(replica, 1, heard)
    assert heard.positions == []
    replica.acknowledge(1)
    assert replica.settle() and heard.positions == [1]
    assert [entry.position for entry in replica.outbox] == [2]
    replica.take(ALONE)
    assert replica.settle() and heard.positions == [1, 2] and not replica.outbox


def test_a_replica_in_the_making_counts_from_its_copy_on():
    heard = Heard()
    replica = Replica(shard(0), MOVING)
    push(replica, 0, heard)
    assert heard.positions == [1] and replica.needs_copy and not replica.outbox
    replica.copy_taken()
    push(replica, 1, heard)
    assert heard.positions == [1, 2] and not replica.synced
    replica.acknowledge(1)
    push(replica, 2, heard)
    assert heard.positions == [1, 2] and not replica.synced
    replica.acknowledge(2)
    assert replica.synced
    replica.acknowledge(3)
    assert replica.settle() and heard.positions == [1, 2, 3]


def test_another_move_to_the_same_server_begins_anew():
    replica = Replica(shard(1), MOVING)
    replica.copy_taken()
    replica.acknowledge(1)
    assert replica.synced
    replica.take(MOVING)
    assert replica.synced
    replica.take(MOVING._replace(outgoing=MOVE._replace(begun=6)))
    assert replica.needs_copy and not replica.synced


def test_who_waits_hears_that_the_shard_has_left():
    heard = Heard()
    replica = Replica(shard(0), HEAD)
    push(replica, 0, heard)
    replica.drop()
    assert heard.reasons == ["shard 0 has left this server"]


def test_places():
    view = View(7, {}, ((1, 2), (2,), (1,)), (Move(1, 2, 1, 5), Move(2, 1, 2, 6)), 3)
    assert places(view, 1) == {
        0: Place(True, False, successor=2),
        1: Place(False, False, incoming=Move(1, 2, 1, 5)),
        2: Place(True, True, successor=2, outgoing=Move(2, 1, 2, 6)),
    }
    assert places(view, 2)[0] == Place(False, True)
    assert places(view, 3) == {}
