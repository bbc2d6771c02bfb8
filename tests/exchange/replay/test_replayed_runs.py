"""A run of several workers on several servers, and the same once more from its logs: equal bit for bit."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.client.actions import Actions, read_actions
from paceline.exchange.client.client import ServerExchange
from paceline.exchange.compress.feedback import Compression
from paceline.exchange.directory import Directory
from paceline.exchange.interface import Deal, Dealer, Fetching, Order, Rows
from paceline.exchange.replay.compare import difference
from paceline.exchange.replay.replay import Replay
from paceline.exchange.replay.whole import replay
from paceline.exchange.shard.log import read_updates
from paceline.exchange.shard.manifest import Manifest
from paceline.exchange.shard.snapshot import Taken, load_shard, write_shard
from paceline.exchange.shard.whole import write_initial
from tests.exchange.loopback import SECRET, Tasks, charter, finish, loopback
from tests.exchange.replay.logged_runs import TASKS, job, one_worker, ran, values, work


@pytest.fixture(autouse=True)
def _stacks() -> Iterator[None]:
    faulthandler.dump_traceback_later(100, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("consistency", ["asp", "ssp(2)", "bsp"])
def test_a_run_is_replayed_bit_for_bit(consistency: str, tmp_path: Path) -> None:
    directory = ran(job(consistency), tmp_path, {})
    outcome = replay(directory, work)
    assert outcome.difference is None
    closings = TASKS // 2 if consistency == "bsp" else 0
    assert (outcome.snapshot, outcome.workers, outcome.updates) == (1, 3, 5 * (TASKS + closings))


@pytest.mark.parametrize("consistency", ["asp", "ssp(1)", "bsp"])
def test_so_is_one_whose_workers_and_servers_died(consistency: str, tmp_path: Path) -> None:
    directory = ran(job(consistency), tmp_path, {1: -2, 2: 3}, kills=(2, 1))
    directory.actions(7).touch()  # of a worker that was killed before it wrote that it is one
    assert replay(directory, work).difference is None


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    return ran(job("asp"), tmp_path_factory.mktemp("run"), {})


def test_a_run_that_was_resumed_is_replayed_from_where_it_went_on(one_run: Directory, tmp_path: Path) -> None:
    """It goes on from a snapshot of which each shard is of a moment of its own, with tasks that others lack."""
    made, directory = job("asp"), Directory(tmp_path)
    directory.write(charter(made, TASKS))
    shards = [load_shard(one_run.snapshot(0), made, number) for number in range(made.shards)]
    actions = [read_actions(path) for path in sorted(one_run.root.glob("actions/*"))]
    marks = {shard: TASKS // 2 + shard % 4 for shard in range(made.shards)}
    states = Replay(made, shards, read_updates([one_run.updates(1)]), actions, marks).run(work)
    files = {
        shard: write_shard(directory.snapshots, made, Taken(0, shard, state, None)) for shard, state in states.items()
    }
    Manifest(0, 0, 0, 1, files).write(directory.snapshot(0))
    shards = [load_shard(directory.snapshot(0), made, number) for number in range(made.shards)]
    first = made.pieces * min(shard.completed for shard in shards)
    with loopback(made, 2, shards=shards) as there:
        dealer = Tasks(TASKS, there, first)
        with ThreadPoolExecutor() as pool:
            workers = [pool.submit(one_worker, there, dealer, number, directory, 0, None) for number in (1, 2)]
        assert [worker.result() for worker in workers] == [None] * 2
        finish(there, directory, TASKS)
    outcome = replay(directory, work)
    assert outcome.difference is None
    assert outcome.updates == made.shards * TASKS - sum(marks.values())


def test_what_another_part_went_on_with_is_compared_with_what_came_out_before(
    one_run: Directory, tmp_path: Path
) -> None:
    after, given = Directory(tmp_path), charter(job("asp"), TASKS)
    after.write(replace(given, terms=replace(given.terms, restored=1)))

    def begins(*, forgets: bool) -> None:
        shards = [load_shard(one_run.snapshot(1), given.job, number) for number in range(given.job.shards)]
        if forgets:  # what the optimizer had
            shards[0].fill(0, shards[0].read(0).clone())
        taken = [Taken(1, shard.number, shard.state(), None) for shard in shards]
        files = {one.shard: write_shard(after.snapshots, given.job, one) for one in taken}
        Manifest(1, 0, 0, 1, files).write(after.snapshot(1))

    begins(forgets=False)
    assert replay(one_run, work, follows=after).difference is None
    after.write(replace(given, terms=replace(given.terms, restored=1, first_task=TASKS)))
    at_its_end = replay(after, work)
    assert (at_its_end.snapshot, at_its_end.updates, at_its_end.difference) == (1, 0, None)
    begins(forgets=True)
    found = str(replay(one_run, work, follows=after).difference)
    assert found.startswith("shard 0 at position 14: mean of weight, element ") and "is 0.0 in the snapshot" in found


@pytest.mark.parametrize("codec", ["int8", "top_k(0.05)", "power_sgd(2)"])
def test_so_is_one_whose_gradients_were_compressed(codec: str, tmp_path: Path) -> None:
    made = job("ssp(1)")
    directory = ran(made, tmp_path, {1: 2}, kills=(2,), codec=codec)
    outcome = replay(directory, work, compression=lambda: Compression.of(made, codec))
    assert outcome.difference is None
    assert replay(directory, work).difference is not None  # it made a difference


@pytest.mark.parametrize("deaths", [{}, {1: -2, 2: 3}])
def test_so_is_one_whose_steps_were_clipped(deaths: Mapping[int, int], tmp_path: Path) -> None:
    """What closes a step is in no log of actions: it follows from what shards come to."""
    made = replace(job("bsp"), clip=30.0)
    directory = ran(made, tmp_path, deaths, kills=(2,) if deaths else ())
    assert b'"worker": 0' not in b"".join(path.read_bytes() for path in directory.root.glob("actions/*"))
    outcome = replay(directory, work)
    assert outcome.difference is None
    assert outcome.updates == 5 * (TASKS + TASKS // 2)
    directory.write(charter(replace(made, clip=29.9), TASKS))
    assert replay(directory, work).difference is not None  # it made a difference


def test_a_read_that_gave_way_gives_way_again(tmp_path: Path) -> None:
    directory = ran(job("bsp"), tmp_path, {}, gone_with=[0])
    assert any(None in read_actions(path).pulls.values() for path in directory.root.glob("actions/*"))
    assert replay(directory, work).difference is None


def test_a_worker_that_left_pushed_what_it_still_had(tmp_path: Path) -> None:
    def gathers(number: int, exchange: Fetching, dealer: Dealer) -> None:
        gathered: list[Deal] = []
        while (deal := dealer.next_task()).order is Order.TASK:
            exchange.pull([1], [bias := torch.empty(9, dtype=torch.float64)], exchange.job.clock(deal.number))
            gathered.append(deal)
        exchange.push([deal.number for deal in gathered], {1: bias + 1}, {})
        exchange.flush()
        dealer.done(gathered)

    made = job("asp")
    directory = Directory(tmp_path)
    directory.write(charter(made, 3))
    write_initial(directory.snapshots, made, values())
    shards = [load_shard(directory.snapshot(0), made, number) for number in range(made.shards)]
    with loopback(made, 1, shards=shards) as there:
        exchange = ServerExchange(charter(made, 3), there.member(), SECRET, directory)

        class Leaving(Tasks):
            def next_task(self) -> Deal:
                return super().next_task() if self._next < 3 else Deal(Order.END)

        class Unlogged:
            def __init__(self) -> None:
                self.tasks = Leaving(3)
                self.logged = exchange.logged(self.tasks)

            def next_task(self) -> Deal:  # who is asked to leave asks for no more
                return (self.logged if self.tasks._next < 3 else self.tasks).next_task()

            def __getattr__(self, name: str) -> object:
                return getattr(self.logged, name)

        gathers(1, exchange, Unlogged())  # type: ignore[arg-type]
        exchange.close()
        finish(there, directory, 3)
    assert replay(directory, gathers).difference is None


def test_a_difference_is_named(one_run: Directory) -> None:

    def other(number: int, exchange: Fetching, dealer: Dealer) -> None:
        work(number, Nudged(exchange) if number == 2 else exchange, dealer)  # type: ignore[arg-type]

    found = replay(one_run, other).difference
    assert found is not None and "bias" in str(found) and "element 3 " in str(found)


class Nudged:
    """An exchange whose last push is off by the least there is."""

    def __init__(self, exchange: Fetching) -> None:
        self._exchange = exchange

    def __getattr__(self, name: str) -> object:
        return getattr(self._exchange, name)

    def push(self, tasks: Sequence[int], dense: Mapping[int, Tensor], rows: Mapping[int, Rows], weight: float) -> None:
        bias = dense[1].clone()
        bias[3] += 1e-9
        self._exchange.push(tasks, {**dense, 1: bias}, rows, weight)


def test_a_worker_that_does_something_else_is_named(one_run: Directory) -> None:

    def reads_less(number: int, exchange: Fetching, dealer: Dealer) -> None:
        bias = torch.empty(9, dtype=torch.float64)
        exchange.pull([1], [bias], 0)

    with pytest.raises(ExchangeError, match=r"read 1 of worker 1 was of shards \[.*\], and is now of \[\d\]"):
        replay(one_run, reads_less)

    def pushes_others(number: int, exchange: Fetching, dealer: Dealer) -> None:
        exchange.push([dealer.next_task().number + 1], {}, {})

    with pytest.raises(ExchangeError, match="push 1 of worker 1 was of tasks"):
        replay(one_run, pushes_others)

    def stops(number: int, exchange: Fetching, dealer: Dealer) -> None:
        if number != 3:
            work(number, exchange, dealer)

    with pytest.raises(ExchangeError, match=r"shard 0 waits for update 1 of worker 3 \(tasks"):
        replay(one_run, stops)

    def fails(number: int, exchange: Fetching, dealer: Dealer) -> None:
        raise ValueError("a fault in a model")

    with pytest.raises(ExchangeError, match="worker 1 failed in the replay: a fault in a model"):
        replay(one_run, fails)


def test_a_state_on_the_way_is_reached_though_others_are_behind(one_run: Directory) -> None:
    made = job("asp")
    paths = sorted(one_run.root.glob("actions/*"))
    records = read_updates([one_run.updates(1)])

    def states(marks: Mapping[int, int]) -> Mapping[int, object]:
        shards = [load_shard(one_run.snapshot(0), made, number) for number in range(5)]
        actions: list[Actions] = [read_actions(path) for path in paths]
        return Replay(made, shards, records, actions, marks).run(work)

    early = states({0: 4, 1: 12, 2: 0, 3: 1, 4: 9})
    assert [early[shard].meta["position"] for shard in range(5)] == [4, 12, 0, 1, 9]  # type: ignore[attr-defined]
    again = states({0: 4, 4: 9})
    for shard in (0, 4):
        assert difference(made, shard, early[shard], again[shard]) is None  # type: ignore[arg-type]


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    made = job("asp")
    directory = Directory(tmp_path)
    directory.write(charter(made, TASKS))
    write_initial(directory.snapshots, made, values())
    with pytest.raises(ExchangeError, match="no snapshot later than 0"):
        replay(directory, work)
    with pytest.raises(ExchangeError, match="no snapshot 5"):
        replay(directory, work, snapshot=5)
