"""Servers in this process, over real sockets: shards without replicas, whose views a test makes by hand.

A server that is killed loses its connections; its shards go to others with all that was applied, as they do where there
are replicas.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.interface import Deal, Order
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.layout import dense_ranges
from paceline.exchange.messages import Kind, Payload, unpacked
from paceline.exchange.server.entry import pushed
from paceline.exchange.shard.log import Record, UpdateLog
from paceline.exchange.shard.manifest import Manifest
from paceline.exchange.shard.shard import Shard
from paceline.exchange.shard.snapshot import Snapshots
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.updates import Update
from paceline.exchange.view import Address, View
from paceline.exchange.wire.frame import Connection, Frame
from paceline.exchange.wire.listen import Listener

SECRET = b"a secret of tests"
PARK_S = 0.005


def charter(job: Job, tasks: int = 0, transport: str = "auto") -> Charter:
    return Charter(job, Terms(tasks=tasks), Address(), transport=transport)


def begun(job: Job, dense: Mapping[str, Tensor] | None = None) -> list[Shard]:
    """Shards of a job that begins; dense tables are zeros where nothing is given."""
    shards = [Shard(job, number) for number in range(job.shards)]
    for index, table in enumerate(job.tables):
        if isinstance(table, DenseTable):
            values = (
                (dense or {}).get(table.name, torch.zeros(table.shape, dtype=getattr(torch, table.dtype))).reshape(-1)
            )
            for shard in shards:
                runs = [
                    values[r.start : r.stop] for r in dense_ranges(job) if (r.table, r.shard) == (index, shard.number)
                ]
                if runs:
                    shard.table(index).fill(torch.cat(runs))
    return shards


class Loopback:
    """Servers with their shards, and what a member of the job would know of them.

    Attributes:
        view: the newest view.
        applied: by shard the updates in order, with the staleness of each.
        put_off: workers of whom a read was put off.
        refuse: servers that refuse everything.
        deaf: servers that answer nothing, as if stopped.
        silent: servers that apply the next push and then go away without a word.
    """

    def __init__(
        self, job: Job, servers: int = 1, folder: Path | None = None, shards: list[Shard] | None = None
    ) -> None:
        self.job = job
        self.lock = threading.Condition()
        self.shards = shards or begun(job)
        self.applied: list[list[tuple[Update, int]]] = [[] for _ in range(job.shards)]
        self.refuse: set[int] = set()
        self.deaf: set[int] = set()
        self.silent: set[int] = set()
        self.orphans = False
        self.put_off: set[int] = set()
        self.members: list[Member] = []
        self._callbacks: list[Callable[[View], None]] = []
        self._servers: dict[int, _Server] = {}
        self._folder = folder
        self.view = View()
        for _ in range(servers):
            self.start()
        self.spread()

    def start(self) -> int:
        number = max(self._servers, default=0) + 1
        self._servers[number] = _Server(self, number, self._folder)
        return number

    def spread(self) -> None:
        """Deal shards out to servers that are there, in a new view."""
        there = sorted(self._servers)
        chains = tuple((there[shard % len(there)],) for shard in range(self.job.shards)) if there else ()
        self.adopt(View(self.view.epoch + 1, {n: s.address for n, s in self._servers.items()}, chains, (), 1))

    def adopt(self, view: View) -> None:
        with self.lock:
            self.view = view
            self.lock.notify_all()
        for callback in self._callbacks:
            callback(view)

    def kill(self, server: int, *, told: bool = True) -> None:
        """End a server; told: there is a new view at once."""
        self._servers.pop(server).close()
        if told:
            self.spread()

    def member(self, number: int = 1) -> Member:
        self.members.append(Member(self, number))
        return self.members[-1]

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def dense(self, table: int) -> Tensor:
        """A dense table, put together."""
        held = self.job.tables[table]
        assert isinstance(held, DenseTable)
        values = torch.empty(held.count, dtype=getattr(torch, held.dtype))
        taken = dict.fromkeys(range(self.job.shards), 0)
        for part in dense_ranges(self.job):
            if part.table == table:
                at = taken[part.shard]
                values[part.start : part.stop] = self.shards[part.shard].read(table)[at : at + part.count]
                taken[part.shard] += part.count
        return values.view(held.shape)


@contextmanager
def loopback(
    job: Job, servers: int = 1, folder: Path | None = None, shards: list[Shard] | None = None
) -> Iterator[Loopback]:
    made = Loopback(job, servers, folder, shards)
    try:
        yield made
    finally:
        made.close()


def finish(there: Loopback, directory: Directory, tasks: int) -> None:
    """Write what servers write."""
    log = UpdateLog(directory.updates(1), 1)
    for shard, applied in enumerate(there.applied):
        log.append(
            Record(1, shard, position, update.worker, update.sequence, staleness, update.tasks)
            for position, (update, staleness) in enumerate(
                applied, start=there.shards[shard].position - len(applied) + 1
            )
        )
    log.close()
    writer = Snapshots(directory.snapshots, there.job)
    files = {shard.number: writer.write(writer.take(shard, 1)) for shard in there.shards}
    Manifest(1, there.job.clock(tasks), tasks, 1, files).write(directory.snapshot(1))


@dataclass
class Member:
    """What `membership.member.Member` is to a worker."""

    servers: Loopback
    id: int
    fenced: bool = False
    failure: str = ""
    waited: list[int] = field(default_factory=list)

    @property
    def view(self) -> View:
        return self.servers.view

    @property
    def orphans(self) -> bool:
        return self.servers.orphans

    def wait_for_view(self, newer_than: int, timeout_s: float) -> View:
        self.waited.append(newer_than)
        with self.servers.lock:
            self.servers.lock.wait_for(lambda: self.servers.view.epoch > newer_than, timeout_s)
            return self.servers.view

    def on_view(self, callback: Callable[[View], None]) -> None:
        self.servers._callbacks.append(callback)


class Tasks:
    """Deals tasks from the first on to several workers; those of workers that are gone come first."""

    def __init__(self, tasks: int, servers: Loopback | None = None, first: int = 0) -> None:
        self._lock = threading.Lock()
        self._tasks, self._next, self._servers = tasks, first, servers
        self._orphans: list[int] = []
        self.finished = set(range(first))

    def next_task(self) -> Deal:
        with self._lock:
            if self._orphans:
                deal = Deal(Order.TASK, self._orphans.pop(0), alone=True)
            elif self._next < self._tasks:
                deal = Deal(Order.TASK, self._next)
                self._next += 1
            else:
                deal = Deal(Order.END if len(self.finished) == self._tasks else Order.WAIT)
            self._tell()
            return deal

    def done(self, deals: Sequence[Deal]) -> None:
        with self._lock:
            self.finished.update(deal.number for deal in deals)

    def put_back(self, deals: Sequence[Deal]) -> None:
        with self._lock:
            self._orphans += [deal.number for deal in deals]
            self._tell()

    def give_up(self, tasks: Sequence[int]) -> None:
        """A worker is gone; these were its tasks."""
        self.put_back([Deal(Order.TASK, task) for task in tasks])

    def _tell(self) -> None:
        if self._servers is not None:
            self._servers.orphans = bool(self._orphans)


class _Server:
    def __init__(self, servers: Loopback, number: int, folder: Path | None) -> None:
        self._all, self._number = servers, number
        self._listener = Listener("127.0.0.1", SECRET, unix=None if folder is None else str(folder / f"{number}.sock"))
        self.address = self._listener.address
        self._closed = False
        self._connections: list[Connection] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        with suppress(ConnectionLost):
            while True:
                connection = self._listener.accept()
                self._connections.append(connection)
                if self._closed:
                    connection.close()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        worker = 0
        with suppress(ConnectionLost):
            while True:
                frame = connection.receive()
                if frame.kind == Kind.HELLO:
                    worker = int(json.loads(frame.text)["id"])
                    continue
                while self._number in self._all.deaf and not self._closed:
                    time.sleep(0.005)
                answer = self._answer(frame)
                if answer is None:
                    self.close()
                    return
                if answer.kind == Kind.NOT_YET:
                    self._all.put_off.add(worker)
                answer.request = frame.request
                connection.send(answer)

    def _answer(self, frame: Frame) -> Frame | None:
        everything = self._all
        with everything.lock:
            view = everything.view
            try:
                if frame.epoch != view.epoch or self._number in everything.refuse:
                    return Frame(Kind.REFUSED, epoch=view.epoch, text="another epoch")
                if frame.kind == Kind.PULL:
                    return self._read(frame)
                if frame.kind == Kind.NORMS:
                    return self._norms(frame)
                answer = self._apply(frame)
                if self._number in everything.silent:
                    everything.silent.discard(self._number)
                    return None
                return answer
            except ExchangeError as error:
                return Frame(Kind.FAILED, text=str(error))

    def _mine(self, shard: int) -> Shard:
        if self._all.view.head(shard) != self._number:
            raise ExchangeError(f"server {self._number} does not hold shard {shard}")
        return self._all.shards[shard]

    def _read(self, frame: Frame) -> Frame:
        payloads = unpacked(frame.numbers, frame.tensors)
        wanted = [(self._mine(part.shard), payload.table) for payload in payloads for part in payload.slices]

        def ready() -> bool:
            return self._all.view.epoch != frame.epoch or all(
                shard.ready(table, frame.clock) for shard, table in wanted
            )

        is_ready = self._all.lock.wait_for(ready, PARK_S)
        if self._all.view.epoch != frame.epoch:
            return Frame(Kind.REFUSED, epoch=self._all.view.epoch, text="another epoch by now")
        if not is_ready:
            missing = sorted({task for shard, table in wanted for task in shard.missing(table, frame.clock)})
            return Frame(Kind.NOT_YET, numbers=np.array(missing, dtype=np.int64))
        values = [self._values(payload) for payload in payloads]
        positions = [shard.position for shard, _ in wanted]
        return Frame(Kind.PULLED, numbers=np.array(positions, dtype=np.int64), tensors=values)

    def _values(self, payload: Payload) -> Tensor:
        table = self._all.job.tables[payload.table]
        if isinstance(table, DenseTable):
            (part,) = payload.slices
            return self._mine(part.shard).read(payload.table).clone()
        (keys,) = payload.tensors
        out = torch.empty((len(keys), table.width), dtype=getattr(torch, table.dtype))
        for shard, begin, end in payload.slices:
            self._mine(shard).read_rows(payload.table, keys[begin:end], out[begin:end])
        return out

    def _norms(self, frame: Frame) -> Frame:
        shares = [self._mine(shard).share(frame.clock) for shard in frame.numbers.tolist()]
        values = torch.tensor([share.value for share in shares], dtype=torch.float64)
        return Frame(Kind.PULLED, numbers=np.array([share.stage for share in shares]), tensors=[values])

    def _apply(self, frame: Frame) -> Frame:
        numbers: list[int] = []
        updates = [(entry.shard, entry.update(self._all.job)) for entry in pushed(frame, self._all.job, borrowed=True)]
        for shard, update in updates:
            self._mine(shard).check(update)
        for shard, update in updates:
            applied = self._mine(shard).apply(update)
            if not applied.repeated:
                self._all.applied[shard].append((update._replace(parts=()), applied.staleness))
            numbers += (shard, applied.position, applied.staleness)
        self._all.lock.notify_all()
        return Frame(Kind.PUSHED, numbers=np.array(numbers, dtype=np.int64))
