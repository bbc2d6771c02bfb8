"""What a worker does, again and again: read parameters, compute the gradient of a task, push it.

Knows servers by `exchange.interface`, so that the same loop runs in a replay.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from paceline.exchange.interface import Arrivals, Deal, Dealer, Exchange, Interrupted, Order
from paceline.exchange.job import Consistency, Job
from paceline.train.data import MicroBatch
from paceline.train.memory import peak_memory
from paceline.train.servers.worker.gathered import Gathered
from paceline.train.servers.worker.replica import Computed, Evaluated

_WAIT_S: Final = 0.005
"""Between questions for work where there is none."""


class Computer(Protocol):
    """What computes gradients: `replica.Replica`, or what runs it otherwise."""

    @property
    def dense(self) -> Sequence[int]:
        """Tables that are read whole."""
        ...

    @property
    def sparse(self) -> Sequence[int]:
        """Tables of which rows are read."""
        ...

    @property
    def rooms(self) -> Sequence[Tensor]:
        """Where dense tables are read into."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether dense tables may arrive while it computes."""
        ...

    def order(self) -> Sequence[int] | None:
        """Dense tables in the order of their use, if that is known."""
        ...

    def take(self, portions: Sequence[MicroBatch]) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Begin with a task; see `Replica.take`."""
        ...

    def arrived(self, tables: Sequence[int]) -> None:
        """What was read is in its room."""
        ...

    def compute(self, task: int, arrivals: Arrivals | None = None) -> Computed:
        """Compute the task that was taken."""
        ...

    def evaluate(
        self, batches: Iterable[MicroBatch], read: Callable[[Mapping[int, tuple[Tensor, Tensor]]], None]
    ) -> Evaluated:
        """Evaluate what was read."""
        ...


@dataclass(frozen=True)
class TaskReport:
    """A task that was pushed.

    Attributes:
        task: its number.
        loss, weight: see `replica.Computed`.
        read_s, compute_s, push_s: where its time went, in seconds.
        alone: it was another worker's.
        memory_bytes: the most that this process had so far.
    """

    task: int
    loss: float
    weight: float
    read_s: float
    compute_s: float
    push_s: float
    alone: bool
    memory_bytes: int


@dataclass(frozen=True)
class EvaluationReport:
    """Held-out data was looked at, with all tasks of clocks below `clock` applied; see `replica.Evaluated`."""

    clock: int
    loss: float
    weight: float
    seconds: float
    metrics: Mapping[str, float]


class Listener:
    """Is told what a worker did; does nothing with it. Derive, and override what you need."""

    def on_task(self, report: TaskReport) -> None:
        """After a task was pushed."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """After an evaluation."""

    def on_wait(self) -> None:
        """There is nothing to do now."""


class Worker:
    """Computes tasks as they are dealt, until there are no more.

    Args:
        exchange: the parameters.
        dealer: deals tasks.
        computer: computes them.
        portions: returns the samples of a task.
        validation: returns held-out data, batch by batch.
        ahead: tasks that it may hold before the first of them is acknowledged; `Terms.ahead`.
        listener: is told what was done.
        stopping: whether to leave after the task in progress.
    """

    def __init__(
        self,
        exchange: Exchange,
        dealer: Dealer,
        computer: Computer,
        portions: Callable[[int], Sequence[MicroBatch]],
        *,
        validation: Callable[[], Iterable[MicroBatch]] = tuple,
        ahead: int = 1,
        listener: Listener | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._exchange = exchange
        self._dealer = dealer
        self._computer = computer
        self._portions = portions
        self._validation = validation
        self._listener = listener or Listener()
        self._stopping = stopping
        self._job: Job = exchange.job
        rhythm = _rhythm(self._job)
        self._fetch_every, self._push_every = rhythm.fetch_every, rhythm.push_every
        self._ahead = max(ahead, self._push_every)
        self._held: deque[Deal] = deque()  # dealt, not begun
        self._gathered = Gathered()  # computed, not pushed
        self._pushed: list[Deal] = []  # pushed, perhaps not acknowledged
        self._unread = True
        self._since_read = 0

    def run(self) -> None:
        """Work until all tasks are done, or until this worker is to stop."""
        while not self._stopping():
            deal = self._held.popleft() if self._held else self._dealer.next_task()
            match deal.order:
                case Order.TASK:
                    self._do(deal)
                case Order.EVALUATE:
                    self._settle()
                    self._evaluate(deal)
                case Order.WAIT:
                    self._settle()
                    self._listener.on_wait()
                    time.sleep(_WAIT_S)
                case Order.END:
                    break
        self._settle()
        if self._held:
            self._dealer.put_back(list(self._held))

    def _do(self, deal: Deal) -> None:
        """Compute a task, and push it or keep it for the next push."""
        computed, times = self._compute(deal)
        began = time.perf_counter()
        if deal.alone or self._push_every == 1:
            self._exchange.push([deal.number], computed.dense, computed.rows, computed.weight)
            self._pushed.append(deal)
        else:
            self._gathered.add(deal, computed)
            if len(self._gathered) == self._push_every:
                self._push_gathered()
        if deal.alone or len(self._pushed) + len(self._gathered) >= self._ahead:
            self._acknowledge()
        seconds = time.perf_counter() - began
        memory = peak_memory(self._computer.rooms[0].device) if self._computer.rooms else 0
        report = TaskReport(deal.number, computed.loss, computed.weight, *times, seconds, deal.alone, memory)
        self._listener.on_task(report)

    def _compute(self, deal: Deal) -> tuple[Computed, tuple[float, float]]:
        """Read what a task needs, and compute it; return also how many seconds both took.

        A read that would wait for a task whose worker is gone gives way to that task.
        """
        portions = self._portions(deal.number)
        clock = self._job.clock(deal.number)
        while True:
            began = time.perf_counter()
            try:
                arrivals = self._read(portions, clock, afresh=deal.alone)
                read = time.perf_counter()
                computed = self._computer.compute(deal.number, arrivals)
                if arrivals is not None:  # what nobody read is to have come too
                    for table in self._computer.dense:
                        arrivals.wait(table)
            except Interrupted:
                self._exchange.forget()
                self._unread = True
                self._help()
                continue
            return computed, (read - began, time.perf_counter() - read)

    def _read(self, portions: Sequence[MicroBatch], clock: int, *, afresh: bool) -> Arrivals | None:
        """Read dense tables, unless those of an earlier task still serve, and the rows that a task needs."""
        arrivals: Arrivals | None = None
        rows = self._computer.take(portions)
        dense: Sequence[int] = ()
        if afresh or self._unread or self._since_read == self._fetch_every:
            self._unread = True  # until it has succeeded
            arrivals = self._read_in_order(clock)
            dense = self._computer.dense if arrivals is None else ()
            self._since_read = 0
        self._read_now(dense, rows, clock)
        self._unread = False
        self._since_read += 1
        return arrivals

    def _read_in_order(self, clock: int) -> Arrivals | None:
        """Begin to read dense tables in the order of their use, if they may come while it computes."""
        computer, order = self._computer, self._computer.order()
        begin = getattr(self._exchange, "pull_in_order", None)
        if not computer.overlaps or order is None or begin is None:
            return None
        room = dict(zip(computer.dense, computer.rooms, strict=True))
        arrivals: Arrivals = begin(order, [room[table] for table in order], clock)
        return arrivals

    def _read_now(self, dense: Sequence[int], rows: Mapping[int, tuple[Tensor, Tensor]], clock: int) -> None:
        """Read all of these, at once where the exchange can."""
        rooms = self._computer.rooms if dense else ()
        together = getattr(self._exchange, "pull_together", None)
        if together is not None:
            together(dense, rooms, clock, rows)
        else:
            if dense:
                self._exchange.pull(dense, rooms, clock)
            for table, (keys, room) in rows.items():
                self._exchange.pull_rows(table, keys, room, clock)
        self._computer.arrived([*dense, *rows])

    def _help(self) -> None:
        """Do a task whose worker is gone; anything else that is dealt now is kept for later."""
        other = self._dealer.next_task()
        if other.order is Order.TASK and other.alone:
            self._do(other)
            self._unread = True
        elif other.order in (Order.TASK, Order.EVALUATE):
            self._held.append(other)
        else:
            time.sleep(_WAIT_S)

    def _push_gathered(self) -> None:
        """Push the mean gradient of the tasks that were kept."""
        deals, (tasks, dense, rows, weight) = self._gathered.deals, self._gathered.mean()
        self._exchange.push(tasks, dense, rows, weight)
        self._pushed += deals
        self._gathered = Gathered()

    def _acknowledge(self) -> None:
        """Return once all that was pushed is on servers for good, and say that it is done."""
        if self._pushed:
            self._exchange.flush()
            self._dealer.done(self._pushed)
            self._pushed = []

    def _settle(self) -> None:
        """Leave nothing unpushed or unacknowledged."""
        if len(self._gathered):
            self._push_gathered()
        self._acknowledge()

    def _evaluate(self, deal: Deal) -> None:
        """Look at what has been learnt."""
        began = time.perf_counter()
        while True:
            try:
                if self._computer.dense:
                    self._exchange.pull(self._computer.dense, self._computer.rooms, deal.number)
                    self._computer.arrived(self._computer.dense)
                found = self._computer.evaluate(self._validation(), lambda rows: self._read_now((), rows, deal.number))
                break
            except Interrupted:
                self._help()
        self._exchange.forget()
        self._unread = True  # an asynchronous worker goes on from what servers have, not from what was looked at
        seconds = time.perf_counter() - began
        self._listener.on_evaluation(EvaluationReport(deal.number, found.loss, found.weight, seconds, found.metrics))
        self._dealer.done([deal])


def _rhythm(job: Job) -> Consistency:
    """How often dense tables are read and gradients pushed: the same for all tables of a job."""
    return job.tables[0].consistency
