"""Rows that are pushed to many shards in one call are handed to their successors as one shard's would be."""

from __future__ import annotations

import torch

from paceline.exchange.client.outgoing import Cutter
from paceline.exchange.client.pushes import Push
from paceline.exchange.client.routes import DenseRoutes
from paceline.exchange.interface import Rows
from paceline.exchange.job import Consistency, Job, SparseTable
from paceline.exchange.server.entry import Entry, pushed, rows_pushed
from paceline.exchange.server.keeper import Keeper
from paceline.exchange.server.pending import PendingPush
from paceline.exchange.shard.log import Record
from paceline.exchange.shard.shard import Shard
from paceline.exchange.view import Address, View
from paceline.exchange.wire.frame import Frame
from tests.exchange.shard.jobs import assert_same

JOB = Job((SparseTable("rows", 2, consistency=Consistency.parse("asp")),), shards=3)
VIEW = View(1, {1: Address(), 2: Address()}, ((1, 2), (1,), (1, 2)))


class Held:
    """An outlet that keeps what is put."""

    server, queued, bytes = 2, 0, (0, 0)

    def __init__(self) -> None:
        self.items: list[Entry | int] = []

    def put(self, item: Entry | int) -> None:
        self.items.append(item)

    def clear(self) -> None:
        self.items.clear()

    def close(self) -> None:
        """Nothing is open."""

    def is_silent(self, patience_s: float) -> bool:
        return False


class Kept:
    """A server whose shards 0 and 2 have a successor."""

    def __init__(self) -> None:
        self.outlet, self.records, self.answers = Held(), list[Record](), list[Frame]()
        self.keeper = Keeper(
            JOB,
            1,
            outlet=lambda *_: self.outlet,
            synced=lambda _: None,
            trusted=lambda: True,
            applied=self.records.extend,
        )
        self.keeper.adopt(VIEW, {shard: Shard(JOB, shard) for shard in range(3)})

    def pending(self) -> PendingPush:
        pending = PendingPush(7, 3, self.answers.append)
        assert pending.release() is None
        return pending


def a_push(sequence: int) -> Frame:
    draw = torch.Generator().manual_seed(sequence)
    rows = Rows(torch.arange(sequence, 20 + sequence), torch.randn(20, 2, generator=draw))
    outgoing = Cutter(JOB, DenseRoutes(JOB)).cut({}, {0: rows}, keep=False)
    return Push(5, sequence, (sequence - 1,), 1.0, [sequence - 1] * 3, outgoing).frame(range(3))


def test_rows_pushed_together_are_handed_on_as_those_pushed_one_by_one() -> None:
    together, apart = Kept(), Kept()
    for sequence in (1, 2):
        frame = a_push(sequence)
        push, entries = rows_pushed(frame, JOB), pushed(frame, JOB, borrowed=True)
        assert push is not None
        assert not together.keeper.push_rows(1, push, [], together.pending())  # a successor would not get them
        assert together.keeper.push_rows(1, push, entries, together.pending())
        apart.keeper.push(1, entries, [entry.update(JOB) for entry in entries], apart.pending())
        for tensor in frame.tensors:  # the memory of a connection, which its next message changes
            tensor.zero_()
        assert not together.answers  # nothing is committed
        for kept in (together, apart):
            kept.keeper.acknowledged(2, 1, [(0, sequence), (2, sequence)])
            told = kept.answers.pop().numbers.reshape(-1, 3).tolist()
            assert told == [
                [1, sequence, 0],
                [0, sequence, 0],
                [2, sequence, 0],
            ]
    assert together.records == apart.records
    for mine, other in zip(together.outlet.items, apart.outlet.items, strict=True):
        assert isinstance(mine, Entry) and isinstance(other, Entry)
        assert mine[:7] == other[:7] and not mine.borrowed
        for (table, codec, size, tensors), part in zip(mine.parts, other.parts, strict=True):
            assert (table, codec, size) == part[:3]
            assert all(map(torch.equal, tensors, part.tensors))
            assert tensors[1].any()
    for shard in range(3):
        assert_same(together.keeper.replicas[shard].shard.state(), apart.keeper.replicas[shard].shard.state())
