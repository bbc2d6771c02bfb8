"""A worker and servers over sockets: what is read and pushed, and what becomes of it when servers come and go."""

from __future__ import annotations

import faulthandler
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.client.actions import read_actions
from paceline.exchange.client.client import ServerExchange
from paceline.exchange.compress.feedback import Compression
from paceline.exchange.directory import Directory
from paceline.exchange.interface import Interrupted, Rows
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.membership.member import Fenced
from tests.exchange.loopback import SECRET, Loopback, Member, begun, charter, loopback

SGD = Rule("sgd", {"lr": 1.0})


@pytest.fixture(autouse=True)
def _stacks() -> Iterator[None]:
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def job(consistency: str = "asp", shards: int = 5, pieces: int = 1) -> Job:
    how = Consistency.parse(consistency)
    return Job(
        (
            DenseTable("weight", (150, 200), rule=SGD, consistency=how),
            DenseTable("bias", (7,), "float64", rule=SGD, consistency=how),
            SparseTable("rows", 4, rule=SGD, consistency=how, initializer=Initializer("normal", 1.0)),
        ),
        shards=shards,
        pieces=pieces,
    )


def worker(servers: Loopback, number: int = 1, **more: object) -> tuple[ServerExchange, Member]:
    member = servers.member(number)
    return ServerExchange(charter(servers.job), member, SECRET, **more), member  # type: ignore[arg-type]


def dense(exchange: ServerExchange, clock: int = 0) -> list[Tensor]:
    out = [torch.full((150, 200), -7.0), torch.full((7,), -7.0, dtype=torch.float64)]
    exchange.pull([0, 1], out, clock)
    return out


def rows(exchange: ServerExchange, keys: Tensor, clock: int = 0) -> Tensor:
    out = torch.empty(len(keys), 4)
    exchange.pull_rows(2, keys, out, clock)
    return out


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("unix", [False, True])
def test_what_was_pushed_is_read(servers: int, unix: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(150, 200, generator=generator)
    made = job()
    with loopback(made, servers, tmp_path if unix else None, begun(made, {"weight": start})) as there:
        exchange, _ = worker(there)
        assert torch.equal(dense(exchange)[0], start)
        keys = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=generator).unique()[torch.randperm(1000)]
        before = rows(exchange, keys)
        gradient, bias = torch.randn(150, 200, generator=generator), torch.arange(7, dtype=torch.float64)
        pushed = torch.randn(1000, 4, generator=generator)
        exchange.push([0], {0: gradient, 1: bias}, {2: Rows(keys, pushed)})
        exchange.flush()
        assert torch.equal(dense(exchange)[0], start - gradient)
        assert torch.equal(dense(exchange)[1], -bias)
        assert torch.equal(rows(exchange, keys), before - pushed)
        assert torch.equal(rows(exchange, keys.flip(0)[:10]), (before - pushed).flip(0)[:10])
        assert rows(exchange, keys[:0]).shape == (0, 4)
        assert [shard.position for shard in there.shards] == [1] * 5  # also those without a row
        figures = exchange.figures()
        assert figures["pushes"] == 1 and figures["rows_pushed"] == 1000 and figures["staleness"] == {"0": 5}
        assert figures["received_bytes"] > 3 * start.nbytes
        exchange.close()
        exchange.close()
        with pytest.raises(ConnectionLost):
            dense(exchange)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_all_that_a_task_needs_is_read_at_once(servers: int, ahead: bool) -> None:
    made = job(shards=5)
    start = {"weight": torch.randn(150, 200), "bias": torch.randn(7, dtype=torch.float64)}
    with loopback(made, servers, shards=begun(made, start)) as there:
        exchange, _ = worker(there)
        keys = torch.tensor([17, -3, 2**40])
        before = rows(exchange, keys)
        out = [torch.empty(150, 200), torch.empty(7, dtype=torch.float64)]
        found, none = torch.empty(3, 4), torch.empty(0, 4)
        if ahead:
            exchange.fetch([0, 1], out, 0, {2: (keys, found)}).wait()
        else:
            exchange.pull_together([0, 1], out, 0, {2: (keys, found)})
        assert torch.equal(out[0], start["weight"]) and torch.equal(out[1], start["bias"])
        assert torch.equal(found, before)
        exchange.pull_together([1], out[1:], 0, {2: (keys[:0], none)})
        exchange.pull_together([], [], 0, {})
        exchange.close()


def test_pushes_are_told_how_old_they_are() -> None:
    with loopback(job(), 2) as there:
        old, _ = worker(there, 1)
        new, _ = worker(there, 2)
        dense(old)
        for task in range(3):
            dense(new)
            new.push([task], {0: torch.ones(150, 200)}, {})
        new.flush()
        old.push([3], {0: torch.ones(150, 200)}, {})
        old.flush()
        assert old.figures()["staleness"] == {"2": 5}  # three updates: of the bucket of 2 and 3
        assert new.figures()["staleness"] == {"0": 15}
        old.close(), new.close()


def test_gradients_may_change_once_they_were_pushed() -> None:
    with loopback(job(), 2) as there:
        exchange, _ = worker(there, outstanding=8)
        there.deaf.update({1, 2})
        gradient, given = torch.ones(150, 200), torch.ones(3, 4)
        exchange.push([0], {0: gradient}, {2: Rows(torch.arange(3), given)})
        assert exchange.figures()["outstanding"] == 1
        gradient.fill_(100), given.fill_(100)
        there.refuse.update({1, 2})  # what is sent again is what was pushed
        there.deaf.clear()
        threading.Timer(0.05, there.refuse.clear).start()
        exchange.flush()
        assert torch.equal(there.dense(0), torch.full((150, 200), -1.0))
        exchange.close()


def test_gradients_are_compressed_slice_by_slice() -> None:
    made = job()
    with loopback(made, 2) as there:
        exchange, _ = worker(there, compression=Compression.of(made, "int8"))
        gradient, keys = torch.randn(150, 200), torch.arange(300)
        rows_before, pushed = rows(exchange, keys), torch.randn(300, 4)
        there.refuse.add(1)
        threading.Timer(0.05, lambda: there.kill(1)).start()  # what is sent again is what was compressed once
        exchange.push([0], {0: gradient}, {2: Rows(keys, pushed)})
        exchange.flush()
        assert 0 < (dense(exchange)[0] + gradient).abs().max() < 0.05
        assert 0 < (rows(exchange, keys) - rows_before + pushed).abs().max() < 0.05
        figures = exchange.figures()
        assert 2 < figures["compression_ratio"] < 4 and figures["compression_s"] > 0
        exchange.close()


def test_nobody_reads_before_the_clock_allows_it() -> None:
    with loopback(job("ssp(1)"), 2) as there:
        exchange, _ = worker(there, 1)
        other, _ = worker(there, 2)
        dense(exchange, 1)
        threading.Timer(0.1, lambda: other.push([0], {0: torch.ones(150, 200)}, {})).start()
        assert torch.equal(dense(exchange, 2)[0], torch.full((150, 200), -1.0))
        figures = exchange.figures()
        assert set(figures["awaited"]) == {"0"} and figures["clock_wait_s"] > 0
        exchange.close(), other.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_who_waits_for_a_task_of_somebody_who_is_gone_is_interrupted(ahead: bool) -> None:
    with loopback(job("bsp"), 2) as there:
        exchange, _ = worker(there)
        threading.Timer(0.05, lambda: setattr(there, "orphans", True)).start()
        with pytest.raises(Interrupted):
            if ahead:
                exchange.fetch([0], [torch.empty(150, 200)], 1).wait()
            else:
                dense(exchange, 1)
        exchange.push([0], {0: torch.ones(150, 200)}, {})
        assert dense(exchange, 1)[0][0, 0] == -1  # nobody waits any more: orphans or not
        exchange.close()


def test_nothing_is_under_way_once_a_read_gave_way(monkeypatch: pytest.MonkeyPatch) -> None:
    me = threading.current_thread()  # by the time that others look, somebody else has taken the task
    monkeypatch.setattr(Member, "orphans", property(lambda self: threading.current_thread() is me))
    with loopback(job("bsp"), 2) as there:
        exchange, _ = worker(there)
        held, later = torch.full((150, 200), 3.0), torch.empty(7, dtype=torch.float64)
        pending = exchange.fetch([0], [held], 2)  # of a task of which this worker has the one before in hand
        other = exchange.fetch([1], [later], 0)
        with pytest.raises(Interrupted):
            dense(exchange, 1)
        with pytest.raises(Interrupted):
            pending.wait()
        other.wait()
        exchange.push([0], {0: torch.ones(150, 200)}, {})
        assert torch.equal(held, torch.full((150, 200), 3.0)) and dense(exchange, 1)[0][0, 0] == -1
        exchange.close()


def test_a_read_waits_for_a_push_of_its_own_that_was_refused() -> None:
    with loopback(job("ssp(0)"), 2) as there:
        exchange, _ = worker(there, outstanding=4)
        there.refuse.update({1, 2})
        exchange.push([0], {0: torch.ones(150, 200)}, {})
        threading.Timer(0.1, there.refuse.clear).start()
        pending = exchange.fetch([0], [out := torch.empty(150, 200)], 1)
        pending.wait()
        assert out[0, 0] == -1
        assert dense(exchange, 1)[0][0, 0] == -1
        exchange.close()


def test_a_server_that_is_gone_is_asked_no_more() -> None:
    with loopback(job(), 3) as there:
        exchange, _ = worker(there)
        dense(exchange)
        there.kill(2)
        exchange.push([0], {0: torch.ones(150, 200)}, {})
        there.kill(1, told=False)
        threading.Timer(0.1, there.spread).start()
        exchange.push([1], {0: torch.ones(150, 200)}, {})
        exchange.flush()
        assert torch.equal(dense(exchange)[0], torch.full((150, 200), -2.0))
        there.start()
        there.spread()
        there.kill(3)
        assert torch.equal(dense(exchange)[0], torch.full((150, 200), -2.0))
        exchange.close()


def test_a_push_whose_acknowledgement_was_lost_counts_once() -> None:
    with loopback(job(), 2) as there:
        exchange, _ = worker(there)
        there.silent.update({1, 2})
        exchange.push([0], {0: torch.ones(150, 200)}, {})
        threading.Timer(0.05, lambda: (there.start(), there.kill(1, told=False), there.kill(2))).start()
        exchange.flush()
        assert torch.equal(there.dense(0), torch.full((150, 200), -1.0))
        assert [len(applied) for applied in there.applied] == [1] * 5
        exchange.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_server_that_hangs_is_left_when_it_is_out_of_the_view(ahead: bool) -> None:
    with loopback(job(), 2) as there:
        exchange, _ = worker(there)
        dense(exchange)
        there.deaf.add(1)

        def evict() -> None:
            servers = {2: there.view.servers[2]}
            there.adopt(type(there.view)(there.view.epoch + 1, servers, ((2,),) * 5, (), 1))

        threading.Timer(0.1, evict).start()
        if ahead:
            exchange.fetch([0], [torch.empty(150, 200)], 0).wait()
        else:
            dense(exchange)
        exchange.close()


def test_a_wait_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.exchange.client.errands._TELL_S", 0.05)
    with loopback(job("bsp"), 1) as there, caplog.at_level(logging.WARNING):
        exchange, _ = worker(there)
        other, _ = worker(there, 2)
        threading.Timer(0.2, lambda: other.push([0], {}, {})).start()
        dense(exchange, 1)
        assert "tasks 0" in caplog.text
        caplog.clear()
        there.refuse.add(1)
        threading.Timer(0.2, there.refuse.clear).start()
        dense(exchange, 1)
        assert "servers [1]" in caplog.text
        exchange.close(), other.close()


def test_what_is_wrong_is_said() -> None:
    with loopback(job("bsp"), 1) as there:
        exchange, member = worker(there)
        with pytest.raises(ExchangeError, match="weight is \\[150, 200\\] of float32"):
            exchange.pull([0], [torch.empty(3)], 0)
        with pytest.raises(ExchangeError, match="rows is a table of rows"):
            exchange.pull([2], [torch.empty(3)], 0)
        with pytest.raises(ExchangeError, match="dense"):
            exchange.pull_rows(1, torch.arange(3), torch.empty(3, 4), 0)
        with pytest.raises(ExchangeError, match="rows of 4 float32"):
            exchange.pull_rows(2, torch.arange(3), torch.empty(3, 5), 0)
        with pytest.raises(ExchangeError, match="gradient of weight"):
            exchange.push([0], {0: torch.ones(3)}, {})
        with pytest.raises(ExchangeError, match="table 2 is not a dense one"):
            exchange.push([0], {2: torch.ones(3)}, {})
        with pytest.raises(ExchangeError, match="rows of rows"):
            exchange.push([0], {}, {2: Rows(torch.arange(3), torch.ones(2, 4))})
        with pytest.raises(ExchangeError, match="missing are"):  # a server says it
            exchange.push([7], {0: torch.ones(150, 200)}, {})
        exchange.close()
        exchange, member = worker(there)
        pending = exchange.fetch([0], [torch.empty(150, 200)], 1)  # of which the task before is not done
        member.fenced = True
        with pytest.raises(Fenced, match="join again"):
            dense(exchange)
        with pytest.raises(Fenced, match="join again"):
            pending.wait()
        member.fenced, member.failure = False, "all copies of shard 3 were lost"
        with pytest.raises(ExchangeError, match="the job has failed: all copies of shard 3"):
            dense(exchange)
        exchange.close()


def test_reads_ahead_come_in_order(tmp_path: Path) -> None:
    tables = tuple(DenseTable(f"t{i}", (600_000,), rule=SGD, consistency=Consistency.parse("asp")) for i in range(6))
    made = Job((*tables, SparseTable("rows", 4, rule=SGD, consistency=Consistency.parse("asp"))), shards=4)
    values = {table.name: torch.randn(600_000) for table in tables}
    directory = Directory(tmp_path)
    with loopback(made, 2, shards=begun(made, values)) as there:
        exchange, _ = worker(there, directory=directory)
        order = [3, 1, 5, 0, 2, 4]
        out = {table: torch.empty(600_000) for table in order}
        fetched = torch.empty(5, 4)
        arrivals = exchange.pull_in_order(order, [out[table] for table in order], 0)
        later = exchange.fetch((), (), 0, {6: (torch.arange(5), fetched)})
        for table in order:
            arrivals.wait(table)
            assert torch.equal(out[table], values[f"t{table}"])
        later.wait()
        assert torch.equal(fetched, torch.zeros(5, 4))
        exchange.push([0], {}, {})
        exchange.flush()
        exchange.close()
    actions = read_actions(directory.actions(1))
    assert list(actions.pulls) == [1, 2, 3, 4]  # two tables of 2.4 MB each time
    assert all(positions and not any(positions.values()) for positions in actions.pulls.values())
    assert actions.pushes == {1: (0,)}


def test_two_workers_on_synchronous_tables_equal_one() -> None:
    table = DenseTable("weight", (9000,), "float64", SGD, Consistency.parse("bsp"))
    made = Job((table,), shards=3, pieces=2)
    start = torch.randn(9000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradient(task: int, read: Tensor) -> Tensor:
        noise = torch.randn(9000, dtype=torch.float64, generator=torch.Generator().manual_seed(task))
        return 0.1 * noise + 0.01 * read

    def work(there: Loopback, number: int) -> None:
        exchange, _ = worker(there, number)
        read = torch.empty(9000, dtype=torch.float64)
        for task in range(number - 1, 8, 2):
            exchange.pull([0], [read], made.clock(task))
            exchange.push([task], {0: gradient(task, read)}, {}, weight=1.0 + task % 2)
        exchange.close()

    serial = start
    for clock in range(4):
        serial = serial - (gradient(2 * clock, serial) + 2 * gradient(2 * clock + 1, serial)) / 3
    with loopback(made, 2, shards=begun(made, {"weight": start})) as there:
        threads = [threading.Thread(target=work, args=(there, number)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.allclose(there.dense(0), serial, rtol=0, atol=1e-12)
