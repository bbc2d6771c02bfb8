"""Workers as threads that push what depends on what they read, and a check that the log explains what servers have."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.exchange.client.routes import DenseRoutes
from paceline.exchange.interface import Rows
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.layout import shards_of
from paceline.exchange.shard.log import Record, read_updates
from paceline.exchange.shard.norms import closed_by, closing
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Part, Update
from tests.exchange.server.town import WORKERS, Town, beginning

WEIGHT, EMBEDDING = 0, 1
KEYS = 300


def job(mode: str = "asp", *, shards: int = 6, pieces: int = 1, replication: int = 1) -> Job:
    """A dense table in several shards, and rows."""
    consistency = Consistency.parse(mode)
    rule = Rule("adagrad", {"lr": 0.05})
    return Job(
        (
            DenseTable("weight", (5, 4096), "float32", rule, consistency),
            SparseTable("rows", 4, "float32", rule, consistency, Initializer("normal", 0.1)),
        ),
        shards=shards,
        pieces=pieces,
        replication=replication,
        seed=3,
    )


class Pushed(NamedTuple):
    """What a worker pushed for a task."""

    task: int
    weight: Tensor
    rows: Rows


class Labour:
    """Workers of a town; tasks are dealt by a counter."""

    def __init__(self, town: Town, workers: int) -> None:
        self.town = town
        self.pushes: dict[tuple[int, int], Pushed] = {}
        self.errors: list[BaseException] = []
        self._tasks = itertools.count()
        self._stop = threading.Event()
        self.threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(workers)]

    @property
    def done(self) -> int:
        return len(self.pushes)

    def more(self, count: int, timeout_s: float = 8.0) -> None:
        """Return once some more tasks are done."""
        goal, waited = self.done + count, threading.Event()
        for _ in range(int(timeout_s / 0.01)):
            if self.done >= goal or self.errors:
                break
            waited.wait(0.01)
        assert not self.errors, self.errors
        assert self.done >= goal, (self.done, goal, self.town.view, self.town.failures)

    def stop(self) -> None:
        self._stop.set()
        for thread in self.threads:
            thread.join(8)
            assert not thread.is_alive(), (self.town.view, self.town.failures)

    def _work(self, number: int) -> None:
        try:
            self._tasks_of(number)
        except BaseException as error:
            self.errors.append(error)

    def _tasks_of(self, number: int) -> None:
        exchange = self.town.worker(number)
        of = self.town.charter.job
        weight = torch.empty(of.tables[WEIGHT].shape)
        for sequence in itertools.count(1):
            if self._stop.is_set():
                break
            task = next(self._tasks)
            keys = torch.randperm(KEYS, generator=torch.Generator().manual_seed(task))[:20]
            rows = torch.empty(len(keys), 4)
            exchange.pull([WEIGHT], [weight], of.clock(task))
            exchange.pull_rows(EMBEDDING, keys, rows, of.clock(task))
            pushed = Pushed(task, weight * 0.1 + task % 7, Rows(keys, rows + task % 5))
            self.pushes[WORKERS + number, sequence] = pushed
            exchange.push([task], {WEIGHT: pushed.weight}, {EMBEDDING: pushed.rows})
        exchange.flush()
        exchange.close()


@contextmanager
def labour(town: Town, workers: int) -> Iterator[Labour]:
    """Workers that work until the end of the block; then all that they pushed is acknowledged."""
    made = Labour(town, workers)
    for thread in made.threads:
        thread.start()
    try:
        yield made
    finally:
        made.stop()
    assert not made.errors, made.errors


def explain(of: Job, shard: int, records: Sequence[Record], pushes: Mapping[tuple[int, int], Pushed]) -> Shard:
    """Apply what the log says to a shard as it began."""
    made = beginning(of, shard)
    routes = {part.shard: part for part in DenseRoutes(of).of(WEIGHT)}
    for record in records:
        if closed_by(of, record.worker, record.sequence) is not None:
            assert made.apply(closing(record.sequence - 1, 0.0)).position == record.position
            continue
        pushed = pushes[record.worker, record.sequence]
        parts = []
        if shard in routes:
            parts.append(Part(WEIGHT, None, routes[shard].of(pushed.weight.reshape(-1))))
        mine = torch.from_numpy(shards_of(pushed.rows.keys.numpy(), of.shards)) == shard
        if mine.any():
            parts.append(Part(EMBEDDING, pushed.rows.keys[mine], pushed.rows.values[mine]))
        read = record.position - 1 - record.staleness
        update = Update(record.worker, record.sequence, record.tasks, read, 1.0, tuple(parts))
        assert made.apply(update).position == record.position
    return made


def check(work: Labour) -> None:
    """No update was lost or doubled: every replica is what the log says, and every task is in it once."""
    town, of = work.town, work.town.charter.job
    shards: dict[int, list[Shard]] = {}
    for server in town.servers.values():
        for shard, replica in server.keeper.replicas.items():
            if replica.place.incoming is None:
                shards.setdefault(shard, []).append(replica.shard)
    final = {shard: max(copy.position for copy in copies) for shard, copies in shards.items()}
    logs = read_updates(town.logs, final=final)
    for shard in range(of.shards):
        tasks = sorted(task for record in logs[shard] for task in record.tasks)
        assert tasks == sorted(pushed.task for pushed in work.pushes.values()), f"shard {shard}"
        expected = explain(of, shard, logs[shard], work.pushes)
        for copy in shards[shard]:
            assert copy.position == expected.position
            _assert_same(copy, expected)


def _assert_same(one: Shard, other: Shard) -> None:
    for index in one.tables:
        left, right = one.table(index).state(), other.table(index).state()
        for name, tensor in left.items():
            assert torch.equal(tensor, right[name]), (one.number, index, name)
