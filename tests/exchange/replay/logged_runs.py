"""A run of three workers on three servers, with its logs and its last snapshot on disk, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from paceline.exchange.client.client import ServerExchange
from paceline.exchange.compress.feedback import Compression
from paceline.exchange.directory import Directory
from paceline.exchange.interface import Deal, Dealer, Fetching, Interrupted, Order, Rows
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.shard.snapshot import load_shard
from paceline.exchange.shard.whole import write_initial
from tests.exchange.loopback import SECRET, Loopback, Tasks, charter, finish, loopback

TASKS = 14


class Killed(Exception):
    pass


def job(consistency: str) -> Job:
    how = Consistency.parse(consistency)
    return Job(
        (
            DenseTable("weight", (100, 90), rule=Rule("adam", {"lr": 0.01}), consistency=how),
            DenseTable("bias", (9,), "float64", Rule("momentum", {"lr": 0.1}), how),
            SparseTable("rows", 4, "float32", Rule("adagrad", {"lr": 0.1}), how, Initializer("normal", 1.0)),
        ),
        shards=5,
        pieces=2,
        damp_stale=consistency != "bsp",
    )


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"weight": torch.randn(100, 90, generator=generator), "bias": torch.zeros(9, dtype=torch.float64)}


def work(number: int, exchange: Fetching, dealer: Dealer, die_at: int = 0) -> None:
    """A worker: its gradients depend on all that it read, one way or another; every second task reads ahead.

    die_at: it is killed when it has pushed as many tasks, unacknowledged; or, negative, when it is about to.
    """
    weight, bias = torch.empty(100, 90), torch.empty(9, dtype=torch.float64)
    done = 0
    held: list[Deal] = []
    while True:
        deal = held.pop(0) if held else dealer.next_task()
        if deal.order is Order.END:
            return
        if deal.order is Order.WAIT:
            time.sleep(0.002)
            continue
        generator = torch.Generator().manual_seed(deal.number)
        keys = torch.randint(0, 50, (20,), generator=generator).unique()
        rows = torch.empty(len(keys), 4)
        clock = exchange.job.clock(deal.number)
        try:
            if deal.number % 2:
                arrivals = exchange.pull_in_order([0, 1], [weight, bias], clock)
                later = exchange.fetch((), (), clock, {2: (keys, rows)})
                waits = [partial(arrivals.wait, 1), partial(arrivals.wait, 0), later.wait]
                if any([interrupted(wait) for wait in waits]):  # a list: all are waited for
                    raise Interrupted
            elif deal.number % 4:
                exchange.pull_together([0, 1], [weight, bias], clock, {2: (keys, rows)})
            else:
                exchange.pull([0, 1], [weight, bias], clock)
                exchange.pull_rows(2, keys, rows, clock)
        except Interrupted:
            other = dealer.next_task()
            if other.alone:
                orphan(exchange, other.number)
                dealer.done([other])
            elif other.order is Order.TASK:  # somebody else was quicker
                held.append(other)
            held.insert(0, deal)
            continue
        done += 1
        if done == -die_at:
            raise Killed
        noise = torch.randn(100, 90, generator=generator)
        exchange.push(
            [deal.number],
            {0: noise + 0.1 * weight * rows.sum(), 1: bias + noise[0, :9]},
            {2: Rows(keys, rows * weight.mean() + noise.view(-1)[: 4 * len(keys)].view(-1, 4))},
            weight=1.0 + deal.number % 3,
        )
        if done == die_at:
            raise Killed
        exchange.flush()
        dealer.done([deal])


def interrupted(wait: Callable[[], None]) -> bool:
    try:
        wait()
    except Interrupted:
        return True
    return False


def orphan(exchange: Fetching, task: int) -> None:
    bias = torch.empty(9, dtype=torch.float64)
    exchange.pull([1], [bias], exchange.job.clock(task))
    exchange.push([task], {1: bias + task}, {}, weight=2.0)
    exchange.flush()


def one_worker(
    there: Loopback, dealer: Tasks, number: int, directory: Directory, die_at: int, codec: str | None
) -> BaseException | None:
    """Work, and return what went wrong; nobody waits for a worker of which something did."""
    compression = None if codec is None else Compression.of(there.job, codec)
    exchange = ServerExchange(charter(there.job), there.member(number), SECRET, directory, compression, outstanding=2)
    mine: list[int] = []

    class Noting:
        def next_task(self) -> object:
            deal = dealer.next_task()
            if deal.order is Order.TASK:
                mine.append(deal.number)
            time.sleep(0.001 * number)
            return deal

        def __getattr__(self, name: str) -> object:
            return getattr(dealer, name)

    try:
        work(number, exchange, exchange.logged(Noting()), die_at)  # type: ignore[arg-type]
    except Killed:
        left = [task for task in mine if task not in dealer.finished]
        exchange.close()
        dealer.give_up(left)
    except BaseException as error:
        for member in there.members:
            member.fenced = True
        return error
    finally:
        exchange.close()
    return None


def ran(
    made: Job,
    folder: Path,
    deaths: Mapping[int, int],
    kills: Sequence[int] = (),
    gone_with: Sequence[int] = (),
    codec: str | None = None,
) -> Directory:
    """A run, with its logs and its last snapshot on disk.

    gone_with: tasks of a worker that leaves no trace; it is noticed once all others wait, so that one gives way.
    """
    directory = Directory(folder)
    directory.write(charter(made, TASKS))
    write_initial(directory.snapshots, made, values())
    shards = [load_shard(directory.snapshot(0), made, number) for number in range(made.shards)]
    with loopback(made, 3, shards=shards) as there:
        dealer = Tasks(TASKS, there)
        assert [dealer.next_task().number for _ in gone_with] == list(gone_with)
        with ThreadPoolExecutor() as pool:
            workers = [
                pool.submit(one_worker, there, dealer, number, directory, deaths.get(number, 0), codec)
                for number in (1, 2, 3)
            ]
            if gone_with:
                while there.put_off != {1, 2, 3} and not any(worker.done() for worker in workers):
                    time.sleep(0.002)
                dealer.give_up(gone_with)
            for server in kills:
                time.sleep(0.05)
                there.kill(server)
        assert [worker.result() for worker in workers] == [None] * 3
        finish(there, directory, TASKS)
        assert sorted(task for update, _ in there.applied[0] for task in update.tasks) == list(range(TASKS))
    return directory
