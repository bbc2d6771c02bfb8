"""What a worker does, again and again: read parameters, compute the gradient of a task, push it.

Knows servers by `exchange.interface`, so that the same loop runs in a replay. What it does depends on what it is dealt
and reads alone, never on what came first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from paceline.exchange.interface import Deal, Dealer, Exchange, Interrupted, Order
from paceline.exchange.job import Job
from paceline.train.data import MicroBatch
from paceline.train.memory import peak_memory
from paceline.train.servers.worker.ahead import Aside, AtOnce, Awaited, Coming, Lookout
from paceline.train.servers.worker.computer import Computed, Computer
from paceline.train.servers.worker.gathered import Gathered
from paceline.train.servers.worker.reading import ReadAhead, Reader
from paceline.train.servers.worker.reports import EvaluationReport, Listener, TaskReport

_WAIT_S: Final = 0.005
"""Between questions for work where there is none."""


class Worker:
    """Computes tasks as they are dealt, until there are no more.

    Args:
        exchange: the parameters.
        dealer: deals tasks.
        computer: computes them.
        portions: returns the samples of a task; another thread may ask while a task is computed.
        validation: returns held-out data, batch by batch.
        ahead: tasks that it may be dealt before the first of them is acknowledged; `Terms.ahead`.
        read_ahead: what of the next task is read while one is computed.
        aside: where that is done; by default before it computes.
        listener: is told what was done.
        idle: called where there is nothing to do, before it asks again.
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
        ahead: int = 2,
        read_ahead: ReadAhead = ReadAhead.SAMPLES,
        aside: Aside | None = None,
        listener: Listener | None = None,
        idle: Callable[[], None] = lambda: time.sleep(_WAIT_S),
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._exchange = exchange
        self._dealer = dealer
        self._computer = computer
        self._validation = validation
        self._listener = listener or Listener()
        self._idle = idle
        self._stopping = stopping
        self._job: Job = exchange.job
        self._push_every = self._job.tables[0].consistency.push_every  # the same for all tables
        self._most = max(ahead - 1, self._push_every)  # held unacknowledged, beside the next one
        self._reader = Reader(exchange, computer, read_ahead)
        self._lookout = Lookout(self._job, dealer, computer, portions, self._reader, aside or AtOnce())
        self._held: deque[Deal] = deque()  # dealt, not begun
        self._gathered = Gathered()  # computed, not pushed
        self._pushed: list[Deal] = []  # pushed, perhaps not acknowledged

    def run(self) -> None:
        """Work until all tasks are done, or until this worker is to stop."""
        try:
            while not self._stopping():
                seen = self._lookout.take()
                if seen is not None and seen.deal.order is Order.WAIT:  # that was before the task was done
                    self._settle()
                    seen = None
                if not self._obeys(seen or Coming(self._held.popleft() if self._held else self._dealer.next_task())):
                    break
            self._settle()
            self._put_back()
        finally:
            self._lookout.close()

    def _obeys(self, coming: Coming) -> bool:
        """Do what is next; whether there is more."""
        match coming.deal.order:
            case Order.TASK:
                self._do(coming)
            case Order.EVALUATE:
                self._settle()
                self._evaluate(coming.deal)
            case Order.WAIT:
                self._settle()
                self._listener.on_wait()
                self._idle()
            case Order.END:
                return False
        return True

    def _do(self, coming: Coming) -> None:
        """Compute a task, and push it or keep it for the next push."""
        deal = coming.deal
        computed, times = self._compute(coming)
        began = time.perf_counter()
        norm = computed.norm if self._job.pieces == 1 else None  # else it is of a task, and its step has others
        if deal.alone or self._push_every == 1:
            of_step = self._exchange.push([deal.number], computed.dense, computed.rows, computed.weight)
            norm = norm if of_step is None else of_step
            self._pushed.append(deal)
        else:
            self._gathered.add(deal, computed)
            if len(self._gathered) == self._push_every:
                self._push_gathered()
        if deal.alone or len(self._pushed) + len(self._gathered) >= self._most:
            self._acknowledge()
        self._reader.learn(computed, self._job.clock(deal.number))
        seconds = time.perf_counter() - began
        memory = peak_memory(self._computer.rooms[0].device) if self._computer.rooms else 0
        report = TaskReport(deal.number, computed.loss, computed.weight, *times, seconds, deal.alone, memory, norm)
        self._listener.on_task(report)

    def _compute(self, coming: Coming) -> tuple[Computed, tuple[float, float]]:
        """Read what a task needs, and compute it; return also how many seconds both took.

        A read that would wait for a task whose worker is gone gives way to that task.
        """
        deal, early = coming.deal, coming.early
        prepared = self._lookout.prepared(coming)
        clock = self._job.clock(deal.number)
        while True:
            began = time.perf_counter()
            try:
                arrivals = self._reader.read(prepared, early, clock, afresh=deal.alone)
                read = time.perf_counter()
                if arrivals is None:
                    self._look_ahead(deal)
                    computed = self._computer.compute(deal.number)
                else:
                    awaited = Awaited(arrivals, self._computer.dense, lambda: self._look_ahead(deal))
                    computed = self._computer.compute(deal.number, awaited)
                    awaited.wait_for_all()
            except Interrupted:
                early = None
                self._exchange.forget()
                self._reader.again()
                self._help()
                continue
            return computed, (read - began, time.perf_counter() - read)

    def _look_ahead(self, deal: Deal) -> None:
        """See what comes after a task, now that all it reads has come."""
        if not deal.alone and not self._held:  # not in the midst of another one, and not if it is known
            self._lookout.begin()

    def _help(self) -> None:
        """Do a task whose worker is gone; anything else that is dealt now is kept for later."""
        other = self._dealer.next_task()
        if other.order is Order.TASK and other.alone:
            self._do(Coming(other))
            self._reader.again()
        elif other.order in (Order.TASK, Order.EVALUATE):
            self._held.append(other)
        else:
            self._idle()

    def _push_gathered(self) -> None:
        """Push the sum of the gradients of the tasks that were kept."""
        deals, (tasks, dense, rows, weight) = self._gathered.deals, self._gathered.total()
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

    def _put_back(self) -> None:
        """Give up what was dealt and not begun."""
        seen = self._lookout.take()
        left = [*self._held, *([seen.deal] if seen is not None else [])]
        orders = [deal for deal in left if deal.order in (Order.TASK, Order.EVALUATE)]
        if orders:
            self._dealer.put_back(orders)

    def _evaluate(self, deal: Deal) -> None:
        """Look at what has been learnt."""
        began = time.perf_counter()
        computer = self._computer
        while True:
            try:
                self._reader.read_now(computer.dense, {}, deal.number)
                computer.arrived(computer.dense)
                found = computer.evaluate(self._validation(), lambda rows: self._reader.read_now((), rows, deal.number))
                break
            except Interrupted:
                self._help()
        self._exchange.forget()
        self._reader.again()  # an asynchronous worker goes on from what servers have, not from what was looked at
        seconds = time.perf_counter() - began
        self._listener.on_evaluation(EvaluationReport(deal.number, found.loss, found.weight, seconds, found.metrics))
        self._dealer.done([deal])
