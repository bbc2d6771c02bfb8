"""Servers answer reads, apply pushes and refuse what is not theirs, over real connections."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.errors import ExchangeError
from paceline.exchange.compress.feedback import Compression
from paceline.exchange.interface import Interrupted, Rows
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.layout import dense_ranges
from paceline.exchange.messages import Kind, Payload, Slice, packed
from paceline.exchange.wire.connect import connect
from paceline.exchange.wire.frame import Frame
from tests.exchange.server.town import SECRET, town

SGD = Rule("sgd", {"lr": 1.0})


def job(mode: str = "asp", *, shards: int = 4, pieces: int = 1, replication: int = 1) -> Job:
    consistency = Consistency.parse(mode)
    return Job(
        (
            DenseTable("weight", (120, 100), "float64", SGD, consistency),
            SparseTable("rows", 3, "float64", SGD, consistency, Initializer("normal", 0.1)),
        ),
        shards=shards,
        pieces=pieces,
        replication=replication,
        seed=3,
    )


def begun_weight(of: Job) -> torch.Tensor:
    flat = torch.empty(of.tables[0].count, dtype=torch.float64)
    for held in dense_ranges(of):
        if held.table == 0:
            flat[held.start : held.stop] = (held.shard + 1) / 8
    return flat.view(of.tables[0].shape)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("replication", [1, 2, 3])
def test_push_then_pull(tmp_path, transport, replication):
    of = job(replication=replication)
    with town(of, tmp_path, 3, transport=transport) as place:
        worker = place.worker(1)
        weight, rows, keys = torch.empty(120, 100, dtype=torch.float64), torch.empty(50, 3).double(), torch.arange(50)
        worker.pull([0], [weight], 0)
        worker.pull_rows(1, keys, rows, 0)
        assert torch.equal(weight, begun_weight(of))
        gradient = torch.randn(120, 100, dtype=torch.float64)
        row_gradient = torch.randn(50, 3, dtype=torch.float64)
        worker.push([0], {0: gradient}, {1: Rows(keys, row_gradient)})
        worker.flush()
        after, rows_after = torch.empty_like(weight), torch.empty_like(rows)
        worker.pull([0], [after], 1)
        worker.pull_rows(1, keys, rows_after, 1)
        assert torch.equal(after, weight - gradient)
        assert torch.equal(rows_after, rows - row_gradient)
        worker.close()
        for shard in range(of.shards):
            copies = [server.keeper.replicas[shard] for server in place.servers.values() if shard in server.keeper.held]
            assert len(copies) == replication
            assert {(copy.shard.position, copy.committed) for copy in copies} == {(1, 1)}
        figures = [server.figures() for server in place.servers.values()]
        assert sum(one["updates"] for one in figures) == of.shards * replication
        assert sum(one["master_of"] for one in figures) == of.shards
        assert all(one["sent_bytes"] > 0 and one["lag"] == 0 for one in figures)


def test_reads_wait_for_the_clock(tmp_path):
    of = job("bsp", pieces=2)
    with town(of, tmp_path, 2) as place:
        first, second = place.worker(1), place.worker(2)
        out = torch.empty(120, 100, dtype=torch.float64)
        gradient = torch.ones(120, 100, dtype=torch.float64)
        first.push([0], {0: gradient}, {})
        pull = first.fetch([0], [out], 1)
        second.push([1], {0: 3 * gradient}, {})
        pull.wait()
        assert torch.equal(out, begun_weight(of) - 2)
        first.close()
        second.close()


def test_who_waits_for_a_task_that_nobody_does_hears_of_it_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.exchange.server.peer._PATIENCE_S", 60.0)
    of = job("bsp", shards=1, pieces=2)
    with town(of, tmp_path, 1) as place:
        (server,) = place.servers.values()
        worker = place.worker(1)
        pull = worker.fetch([0], [torch.empty(120, 100, dtype=torch.float64)], 1)
        worker._member.orphans = True
        for _ in range(2):  # also who asks later
            server.keeper.hurry(True)
            with pytest.raises(Interrupted):
                pull.wait()
            pull = worker.fetch([0], [torch.empty(120, 100, dtype=torch.float64)], 1)
        with pytest.raises(Interrupted):
            pull.wait()
        worker.close()


def test_what_is_not_its_own_is_refused(tmp_path):
    of = job()
    with town(of, tmp_path, 2) as place:
        address = place.view.servers[1]
        counts = {held.shard: held.count for held in dense_ranges(of)}
        mine = next(shard for shard in counts if place.view.head(shard) == 1)
        other = next(shard for shard, chain in enumerate(place.view.chains) if chain == (2,))
        connection = connect(address, SECRET, transport="unix")

        def ask(frame: Frame) -> Frame:
            frame.request = 7
            connection.send(frame)
            answer = connection.receive()
            assert answer.request == 7
            return answer

        def pull(shard: int, epoch: int, count: int = 0) -> Frame:
            numbers = packed([Payload(0, 0, (Slice(shard, 0, count or counts.get(shard, 0)),))])
            return ask(Frame(Kind.PULL, epoch=epoch, numbers=np.array(numbers)))

        def push(shard: int, epoch: int, count: int = 0) -> Frame:
            count = count or counts.get(shard, 0)
            tensors = (torch.zeros(count, dtype=torch.float64),)
            payload = Payload(0, 0, (Slice(shard, 0, count),), tensors)
            numbers = np.array([1, 0, 1, shard, -1, *packed([payload])])
            return ask(Frame(Kind.PUSH, epoch=epoch, worker=9, sequence=1, numbers=numbers, tensors=tensors))

        epoch = place.view.epoch
        assert pull(mine, epoch).kind == Kind.PULLED
        assert pull(other, epoch).kind == push(other, epoch).kind == Kind.REFUSED
        assert pull(mine, epoch - 1).kind == push(mine, epoch - 1).kind == Kind.REFUSED
        assert pull(mine, epoch - 1).epoch == epoch
        for wrong in (push(mine, epoch, 99), pull(mine, epoch, 99)):
            assert wrong.kind == Kind.FAILED and "99" in wrong.text
        assert push(mine, epoch).kind == Kind.PUSHED
        again = push(mine, epoch)
        assert (again.kind, again.numbers.tolist()) == (Kind.PUSHED, [mine, 1, 0])
        assert ask(Frame(Kind.FIGURES)).text.startswith('{"updates": 1')
        connection.close()


def test_who_was_stopped_refuses(tmp_path):
    with town(job(), tmp_path, 1) as place:
        worker = place.worker(1)
        out = torch.empty(120, 100, dtype=torch.float64)
        place.servers[1]._member.trusted = False
        pull = worker.fetch([0], [out], 0)
        place.servers[1]._member.trusted = True
        pull.wait()
        worker.close()


def test_a_wrong_push_says_why(tmp_path):
    with town(job(), tmp_path, 2) as place:
        worker = place.worker(1)
        with pytest.raises(ExchangeError, match="rising order"):
            worker.push([3, 1], {}, {})
            worker.flush()
        worker.close()


@pytest.mark.parametrize("replication", [1, 2])
def test_what_is_compressed_is_decoded_by_every_replica(tmp_path, replication):
    of = job(replication=replication)
    with town(of, tmp_path, 2) as place:
        worker = place.worker(1, Compression.of(of, "int8"))
        gradient = torch.randn(120, 100, dtype=torch.float64)
        keys, rows = torch.arange(50), torch.randn(50, 3, dtype=torch.float64)
        worker.push([0], {0: gradient}, {1: Rows(keys, rows)})
        worker.flush()
        after, rows_after = torch.empty_like(gradient), torch.empty_like(rows)
        worker.pull([0], [after], 1)
        worker.pull_rows(1, keys, rows_after, 1)
        moved = begun_weight(of) - after
        assert 0 < (moved - gradient).abs().max() < 0.05
        for shard in range(of.shards):
            copies = [server.keeper.replicas[shard] for server in place.servers.values() if shard in server.keeper.held]
            states = [copy.shard.state().tensors for copy in copies]
            assert len(states) == replication
            assert all(torch.equal(states[0][name], other[name]) for other in states[1:] for name in other)
        worker.close()
