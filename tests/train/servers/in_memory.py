"""Servers and a coordinator as objects of one process: what the loop of a worker is tested against. Real shards."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.exchange.interface import Deal, Interrupted, Order, Rows
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.layout import dense_ranges, shards_of
from paceline.exchange.shard.norms import closing, norm_of
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Part, Update


class Kept:
    """All shards of a job."""

    def __init__(self, job: Job, values: Mapping[str, Tensor]) -> None:
        self.job = job
        self.changed = threading.Condition()
        self.shards = [Shard(job, number) for number in range(job.shards)]
        self.ranges = [
            [
                [held for held in dense_ranges(job) if (held.shard, held.table) == (shard, table)]
                for table in self.tables
            ]
            for shard in range(job.shards)
        ]
        for shard, by_table in zip(self.shards, self.ranges, strict=True):
            for table, ranges in enumerate(by_table):
                if ranges:
                    flat = values[job.tables[table].name].detach().reshape(-1)
                    shard.table(table).fill(torch.cat([flat[held.start : held.stop] for held in ranges]))

    @property
    def tables(self) -> range:
        return range(len(self.job.tables))

    def values(self) -> dict[str, Tensor]:
        """Dense tables as they are."""
        found = {}
        for table in self.tables:
            described = self.job.tables[table]
            if isinstance(described, DenseTable):
                found[described.name] = torch.empty(described.shape, dtype=getattr(torch, described.dtype))
                self.copy(table, found[described.name])
        return found

    def copy(self, table: int, out: Tensor) -> None:
        for shard, by_table in zip(self.shards, self.ranges, strict=True):
            at = 0
            for held in by_table[table]:
                out.view(-1)[held.start : held.stop] = shard.read(table)[at : at + held.count]
                at += held.count


class InMemory:
    """An exchange with them, of one worker; counted from 0."""

    def __init__(self, kept: Kept, worker: int, orphans: Sequence[int] = ()) -> None:
        self.kept, self.job, self.worker = kept, kept.job, worker
        self.pushes: list[tuple[int, ...]] = []
        self.orphans = orphans  # a worker's that is gone: a read that waits gives way to them
        self.pulls = 0
        self._read = [-1] * kept.job.shards
        self._sequence = 0

    def _wait(self, tables: Sequence[int], clock: int) -> None:
        def ready() -> bool:
            return all(shard.ready(table, clock) for shard in self.kept.shards for table in tables)

        while not ready():
            if self.orphans:
                raise Interrupted
            assert self.kept.changed.wait(300), f"worker {self.worker} waits for clock {clock}"

    def pull(self, tables: Sequence[int], out: Sequence[Tensor], clock: int) -> None:
        self.pulls += 1
        with self.kept.changed:
            self._wait(tables, clock)
            for table, to in zip(tables, out, strict=True):
                self.kept.copy(table, to)
            self._read = [shard.position for shard in self.kept.shards]

    def pull_rows(self, table: int, keys: Tensor, out: Tensor, clock: int) -> None:
        with self.kept.changed:
            self._wait([table], clock)
            owners = torch.from_numpy(shards_of(keys.numpy(), self.job.shards))
            for number, shard in enumerate(self.kept.shards):
                mine = owners == number
                rows = torch.empty(int(mine.sum()), out.shape[1], dtype=out.dtype)
                shard.read_rows(table, keys[mine], rows)
                out[mine] = rows

    def forget(self) -> None:
        self._read = [-1] * self.job.shards

    def push(
        self, tasks: Sequence[int], dense: Mapping[int, Tensor], rows: Mapping[int, Rows], weight: float = 1.0
    ) -> None:
        self._sequence += 1
        self.pushes.append(tuple(tasks))
        with self.kept.changed:
            for number, shard in enumerate(self.kept.shards):
                parts = []
                for table, gradient in dense.items():
                    ranges = self.kept.ranges[number][table]
                    if ranges:
                        flat = gradient.reshape(-1)
                        parts.append(Part(table, None, torch.cat([flat[r.start : r.stop] for r in ranges])))
                for table, (keys, values) in rows.items():
                    mine = torch.from_numpy(shards_of(keys.numpy(), self.job.shards)) == number
                    if mine.any():
                        parts.append(Part(table, keys[mine], values[mine].contiguous()))
                update = Update(1 + self.worker, self._sequence, tuple(tasks), self._read[number], weight, tuple(parts))
                shard.apply(update)
            if self.job.closes_steps:
                self._close(self.job.clock(tasks[0]))
            self.kept.changed.notify_all()

    def _close(self, clock: int) -> None:
        norm = norm_of(shard.share(clock) for shard in self.kept.shards)
        if norm is not None:
            for shard in self.kept.shards:
                shard.apply(closing(clock, norm))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Dealing:
    """Deals the tasks of a job, lowest first, to workers that share it."""

    def __init__(self, tasks: int, evaluate: Sequence[int] = ()) -> None:
        self._lock = threading.Lock()
        self._left = list(range(tasks))
        self._dealt: set[int] = set()
        self._evaluate = list(evaluate)
        self.finished: list[int] = []
        self.alone: set[int] = set()

    def next_task(self) -> Deal:
        with self._lock:
            if self._evaluate and (not self._left or self._left[0] >= self._evaluate[0]):
                return Deal(Order.WAIT) if self._dealt else Deal(Order.EVALUATE, self._evaluate.pop(0))
            if self._left:
                task = self._left.pop(0)
                self._dealt.add(task)
                return Deal(Order.TASK, task, task in self.alone)
            return Deal(Order.WAIT if self._dealt else Order.END)

    def done(self, deals: Sequence[Deal]) -> None:
        with self._lock:
            for deal in deals:
                if deal.order is Order.TASK:
                    self._dealt.remove(deal.number)
                    self.finished.append(deal.number)

    def put_back(self, deals: Sequence[Deal]) -> None:
        with self._lock:
            for deal in deals:
                self._dealt.discard(deal.number)
                self.alone.add(deal.number)
            self._left = sorted([*self._left, *(deal.number for deal in deals)])
