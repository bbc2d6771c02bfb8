"""What comes late: from a connection that was given up, of a move that is over, for a successor that is none now."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.messages import Kind
from paceline.exchange.server.copies import copy_of
from paceline.exchange.server.entry import Coded, Entry, forwarded
from paceline.exchange.server.keeper import Keeper
from paceline.exchange.server.outlet import Outlet
from paceline.exchange.server.peer import Peer
from paceline.exchange.server.requests import Broken, Refused
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Applied
from paceline.exchange.view import Address, Move, Turn, View
from paceline.exchange.wire.frame import Frame

JOB = Job((DenseTable("w", (4,)),), shards=1)
SERVERS = {1: Address(), 2: Address(), 3: Address()}
MOVE = Move(0, 1, 2, begun=2)
COPYING = View(2, SERVERS, ((1,),), (MOVE,))
CHAINED = View(3, SERVERS, ((1, 2),))


class Way:
    """An outlet that sends nothing, and keeps what it is to send."""

    def __init__(self, server: int) -> None:
        self.server, self.queue = server, list[Entry | int]()
        self.queued, self.bytes = 0, (0, 0)

    def put(self, item: Entry | int) -> None:
        self.queue.append(item)

    def clear(self) -> None:
        self.queue.clear()

    def close(self) -> None:
        """Another thread may send what is left before it hears of this."""

    def is_silent(self, patience_s: float) -> bool:
        return False


class Predecessor:
    """A connection of server 1."""

    def __init__(self, opened: int) -> None:
        self.opened, self.told = opened, list[tuple[int, list[tuple[int, int]]]]()

    def commit(self, epoch: int, pairs: list[tuple[int, int]]) -> None:
        self.told.append((epoch, pairs))


class Ear:
    def __init__(self) -> None:
        self.committed_at, self.reasons = list[int](), list[str]()

    def committed(self, shard: int, applied: Applied) -> None:
        self.committed_at.append(applied.position)

    def refused(self, why: str) -> None:
        self.reasons.append(why)


class Server:
    """A keeper, its outlets, and the moves that it says are done."""

    def __init__(self, number: int) -> None:
        self.ways: list[Way] = []
        self.synced: list[Move | Turn] = []
        self.full, self.doubts = False, 0
        self.keeper = Keeper(
            JOB,
            number,
            outlet=self._outlet,
            synced=self.synced.append,
            trusted=self._trusted,
            applied=self._applied,
        )

    def _outlet(self, keeper: Keeper, server: int, address: Address, copying: bool) -> Outlet:
        self.ways.append(Way(server))
        return self.ways[-1]

    def _applied(self, *told: object) -> None:
        if self.full:
            raise ExchangeError("the disk is full")

    def _trusted(self) -> bool:
        self.doubts -= 1
        return self.doubts < 0

    def push(self, task: int) -> Ear:
        ear, given = Ear(), entry(0, task)
        self.keeper.push(self.keeper.epoch, [given], [given.update(JOB)], ear)
        return ear

    def hand_on(self, tasks: Sequence[int], by: Predecessor) -> None:
        given = [entry(task + 1, task) for task in tasks]
        self.keeper.hand_on(self.keeper.epoch, given, [one.update(JOB) for one in given], by)


def entry(position: int, task: int) -> Entry:
    return Entry(0, position, 9, task + 1, (task,), -1, 1.0, (Coded(0, 0, 4, (torch.ones(4),)),), False)


def shard(updates: int) -> Shard:
    made = Shard(JOB, 0)
    for task in range(updates):
        made.apply(entry(0, task).update(JOB))
    return made


def test_a_copy_that_waited_does_not_take_the_place_of_a_later_one() -> None:
    target = Server(2)
    target.keeper.adopt(COPYING, {})
    target.keeper.take_copy(2, MOVE, shard(5), by := Predecessor(20))
    target.hand_on([5], by)
    with pytest.raises(ConnectionLost):
        target.keeper.take_copy(2, MOVE, shard(3), Predecessor(10))
    assert target.keeper.replicas[0].shard.position == 6
    target.keeper.take_copy(2, MOVE, shard(7), Predecessor(30))  # its source has begun again
    assert target.keeper.replicas[0].shard.position == 7


def test_what_waited_in_a_connection_does_not_turn_away_what_is_told_to_the_later_one() -> None:
    middle = Server(2)
    chain = View(1, SERVERS, ((1, 2, 3),))
    middle.keeper.adopt(chain, {0: shard(0)})
    early, late = Predecessor(10), Predecessor(20)
    middle.hand_on([0, 1], late)
    with pytest.raises(ConnectionLost):
        middle.hand_on([0], early)
    middle.keeper.acknowledged(3, 1, [(0, 2)])
    assert late.told == [(1, [(0, 2)])] and not early.told
    middle.keeper.adopt(View(2, SERVERS, ((3, 2),)), {})  # another predecessor, with another clock
    middle.hand_on([2], early)
    assert early.told == [(2, [(0, 3)])]


def test_an_acknowledgement_of_an_earlier_move_is_none_of_this_one() -> None:
    source = Server(1)
    source.keeper.adopt(View(1, SERVERS, ((1,),)), {0: shard(2)})
    source.keeper.adopt(COPYING, {})
    again = Move(0, 1, 2, begun=4)
    source.keeper.adopt(View(4, SERVERS, ((1,),), (again,)), {})  # in epoch 3 it was given up
    with source.keeper.lock:
        source.keeper.replicas[0].copy_taken()
    source.keeper.acknowledged(2, 2, [(0, 2)])
    assert not source.synced
    source.keeper.acknowledged(2, 4, [(0, 2)])
    assert source.synced == [again]


class Arriving:
    """A connection over which frames come that were sent before."""

    sent_bytes = received_bytes = 0

    def __init__(self, *frames: Frame) -> None:
        self.frames = list(frames)

    def receive(self, place: object) -> Frame:
        if not self.frames:
            raise ConnectionLost("that was all")
        return self.frames.pop(0)

    def send(self, frame: Frame) -> None:
        """Nobody listens."""

    def close(self) -> None:
        self.frames.clear()


@pytest.mark.parametrize("doubts", [0, 1])
def test_a_copy_of_the_epoch_before_is_taken_or_asked_for_again(doubts: int) -> None:
    """A server that was stopped does not take it yet; its source is to send it again, though the epoch is over."""
    target, failures = Server(2), list[BaseException]()
    target.keeper.adopt(View(3, SERVERS, ((1,),), (MOVE,)), {})
    target.doubts = doubts
    handed = forwarded([entry(6, 5)], 3)
    handed.kind = Kind.FORWARD
    connection = Arriving(copy_of(shard(5), MOVE, 2), handed)
    Peer(connection, target.keeper, dict, failures.append).run()
    assert not failures
    assert [replica.shard.position for replica in target.keeper.replicas.values()] == ([] if doubts else [6])


def test_nothing_is_sent_on_to_who_is_no_successor_any_more() -> None:
    head = Server(1)
    head.keeper.adopt(View(1, SERVERS, ((1, 2),)), {0: shard(0)})
    ear = head.push(0)
    assert [item.position for item in head.ways[0].queue if isinstance(item, Entry)] == [1]
    head.keeper.adopt(View(2, SERVERS, ((1, 3),)), {})
    assert not head.ways[0].queue  # its thread may look once more, and would say that it is of epoch 2
    assert [item.position for item in head.ways[1].queue if isinstance(item, Entry)] == [1]
    head.keeper.acknowledged(3, 2, [(0, 1)])
    assert ear.committed_at == [1]


def test_who_serves_no_more_goes_by_no_view() -> None:
    server = Server(1)
    server.keeper.close()
    server.keeper.adopt(View(1, SERVERS, ((1, 2),)), {0: shard(0)})
    assert not server.keeper.replicas and not server.ways and not server.keeper.epoch


def test_who_cannot_write_its_log_hands_nothing_on_and_is_through() -> None:
    """What it has applied by then is not what its log says, so it is nobody's predecessor and nobody's tail."""
    head = Server(1)
    head.keeper.adopt(View(1, SERVERS, ((1, 2),)), {0: shard(0)})
    first = head.push(0)
    head.full = True
    with pytest.raises(Broken, match="the disk is full"):
        head.push(1)
    assert first.reasons and not first.committed_at
    assert not head.ways[0].queue
    with pytest.raises(Refused):
        head.push(1)


def test_who_cannot_keep_its_log_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ExchangeError("the disk is gone")

    tail = Server(2)
    tail.keeper.adopt(View(1, SERVERS, ((1, 2),)), {0: shard(0)})
    monkeypatch.setattr(tail.keeper, "_settled", fails)
    with pytest.raises(Broken, match="the disk is gone"):
        tail.hand_on([0], by := Predecessor(10))
    assert not by.told
