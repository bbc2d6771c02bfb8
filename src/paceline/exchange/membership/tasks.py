"""Who computes what: tasks and evaluations, each done once by somebody.

Tasks are dealt in order, those of workers that are gone before all others. A worker holds what it was dealt until it
says that it is done, or gives it back, or is gone. Nothing is dealt that would have to wait long: no task of a clock
beyond the lowest that is not done, plus the largest bound, plus one. Where a table is read without a clock of delay,
tasks of clock c wait for a snapshot that is due at clock c, so that it has exactly the tasks below, of every shard:
they would have waited for those anyway. Where all tables are so, they wait for an evaluation too. Elsewhere they go on
beside it.

`choose` decides and changes nothing; the coordinator writes down what it decided and then calls `deal`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from paceline.exchange.interface import Deal, Order
from paceline.exchange.job import Job
from paceline.exchange.terms import Terms

Item: TypeAlias = tuple[Order, int]
"""A task or an evaluation."""


class Tasks:
    """What is done, dealt and given back, of one job.

    Attributes:
        exact: whether all tables are BSP, or as strict.
        cuts: whether one is, so that a snapshot has exactly the tasks of clocks below its own.
        barrier: where one is, the clock whose tasks wait for a snapshot.
    """

    def __init__(self, job: Job, terms: Terms) -> None:
        bounds = [table.consistency.bound for table in job.tables]
        self._pieces, self._total, self._ahead = job.pieces, terms.tasks, terms.ahead
        self.exact = not any(bounds) and None not in bounds
        self.cuts = 0 in bounds or not bounds
        self.barrier: int | None = None
        self._window = None if None in bounds else max((bound or 0 for bound in bounds), default=0) + 1
        self._floor = self._next = terms.first_task
        self._done: set[int] = set()  # tasks above the floor
        self._owners: dict[Item, int] = {}
        self._held: dict[int, set[Item]] = {}
        self._orphans: list[int] = []  # a heap
        self._evaluations = _Evaluations(
            terms.evaluate_every, terms.first_task // job.pieces, terms.tasks // job.pieces
        )

    @property
    def clock(self) -> int:
        """The lowest clock of which not all tasks are done."""
        return self._floor // self._pieces

    @property
    def finished(self) -> bool:
        """Whether all tasks and evaluations are done."""
        return self._floor >= self._total and self._evaluations.finished

    @property
    def orphans(self) -> bool:
        """Whether there are tasks for which others may be waiting, and that nobody does."""
        return bool(self._orphans) and self._allowed(self._orphans[0])

    def counts(self) -> dict[str, int]:
        """Return how far the job is, for people."""
        done = self._floor + len(self._done)
        dealt = sum(order is Order.TASK for order, _ in self._owners)
        return {
            "total": self._total,
            "done": done,
            "dealt": dealt,
            "waiting": len(self._orphans),
            "next": self._next,
            "clock": self.clock,
        }

    def held(self, worker: int) -> list[Item]:
        """Return what a worker is to do, in order."""
        return sorted(self._held.get(worker, ()), key=lambda item: (item[0].value, item[1]))

    def choose(self, worker: int) -> Deal:
        """Return what a worker should do next."""
        held = len(self._held.get(worker, ()))
        if self.orphans:
            return Deal(Order.TASK, self._orphans[0], alone=True)
        if held >= self._ahead:
            return Deal(Order.WAIT)
        clock = self._evaluations.due
        if clock is not None and self._floor >= clock * self._pieces:
            return Deal(Order.EVALUATE, clock)
        if self._next < self._total and self._allowed(self._next):
            return Deal(Order.TASK, self._next)
        return Deal(Order.END) if self.finished else Deal(Order.WAIT)

    def deal(self, worker: int, deal: Deal) -> None:
        """Take down that a worker was dealt this."""
        self._hold(worker, (deal.order, deal.number))

    def done(self, deals: Iterable[Item]) -> bool:
        """Take down that these are done, whoever held them: what was acknowledged is on all shards.

        Returns:
            Whether any of it was news.
        """
        return any([self._finish(item) for item in deals])

    def put_back(self, worker: int, deals: Iterable[Item]) -> None:
        """Take down that a worker does not do these; what it does not hold stays where it is."""
        for item in deals:
            if self._owners.get(item) == worker:
                self._release(item)
                if item[0] is Order.TASK:
                    heapq.heappush(self._orphans, item[1])
                else:
                    self._evaluations.returned(item[1])

    def drop(self, worker: int) -> None:
        """A worker is gone."""
        self.put_back(worker, self.held(worker))

    def agree(self, worker: int, holding: Sequence[Item]) -> None:
        """A worker that came back says what it holds; an answer to it, or a record of one, may have been lost."""
        self.put_back(worker, [item for item in self.held(worker) if item not in holding])
        for item in holding:
            if item not in self._owners and not self._is_done(item):
                self._hold(worker, item)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "floor": self._floor,
            "next": self._next,
            "done": sorted(self._done),
            "held": [[worker, order.value, number] for (order, number), worker in self._owners.items()],
            "orphans": sorted(self._orphans),
            "evaluated": self._evaluations.to_list(),
            "barrier": self.barrier,
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Read what `to_dict` wrote."""
        self._floor, self._next = values["floor"], values["next"]
        self._done, self._orphans = set(values["done"]), list(values["orphans"])
        self._owners, self._held = {}, {}
        self.barrier = values["barrier"]
        self._evaluations.restore(values["evaluated"])
        for worker, order, number in values["held"]:
            self._hold(worker, (Order(order), number))

    def _allowed(self, task: int) -> bool:
        clock = task // self._pieces
        due = (self._evaluations.first if self.exact else None, self.barrier if self.cuts else None)
        if any(at is not None and clock >= at for at in due):
            return False
        return self._window is None or clock <= self.clock + self._window

    def _is_done(self, item: Item) -> bool:
        order, number = item
        if order is Order.EVALUATE:
            return self._evaluations.is_done(number)
        return number < self._floor or number in self._done

    def _hold(self, worker: int, item: Item) -> None:
        order, number = item
        self._owners[item] = worker
        self._held.setdefault(worker, set()).add(item)
        if order is Order.EVALUATE:
            self._evaluations.dealt(number)
            return
        if number in self._orphans:
            self._orphans.remove(number)
            heapq.heapify(self._orphans)
        self._pass_over()

    def _release(self, item: Item) -> None:
        worker = self._owners.pop(item, None)
        if worker is not None:
            self._held[worker].discard(item)
            if not self._held[worker]:
                del self._held[worker]

    def _finish(self, item: Item) -> bool:
        order, number = item
        self._release(item)
        if order is Order.EVALUATE:
            return self._evaluations.finish(number)
        if self._is_done(item) or not 0 <= number < self._total:
            return False
        if number in self._orphans:
            self._orphans.remove(number)
            heapq.heapify(self._orphans)
        self._done.add(number)
        while self._floor in self._done:
            self._done.discard(self._floor)
            self._floor += 1
        self._pass_over()
        return True

    def _pass_over(self) -> None:
        """The next task is the lowest that was never dealt."""
        while self._next < self._total and (
            (Order.TASK, self._next) in self._owners or self._is_done((Order.TASK, self._next))
        ):
            self._next += 1


class _Evaluations:
    """Clocks at which to evaluate: every so many, and at the end."""

    def __init__(self, every: int, first: int, last: int) -> None:
        self._every, self._last = every, last
        self._next: int | None = self._after(first) if first < last else last  # the lowest that was never dealt
        self._returned: set[int] = set()
        self._dealt: set[int] = set()

    @property
    def finished(self) -> bool:
        return self.first is None

    @property
    def first(self) -> int | None:
        """The lowest clock whose evaluation is not done."""
        return min((clock for clock in (self.due, *self._dealt) if clock is not None), default=None)

    @property
    def due(self) -> int | None:
        """The lowest clock whose evaluation nobody does."""
        return min(self._returned, default=self._next)

    def is_done(self, clock: int) -> bool:
        return clock not in self._dealt | self._returned and (self._next is None or clock < self._next)

    def dealt(self, clock: int) -> None:
        self._returned.discard(clock)
        self._dealt.add(clock)
        if clock == self._next:
            self._next = self._after(clock) if clock < self._last else None

    def returned(self, clock: int) -> None:
        self._dealt.discard(clock)
        self._returned.add(clock)

    def finish(self, clock: int) -> bool:
        if self.is_done(clock):
            return False
        self.dealt(clock)
        self._dealt.discard(clock)
        return True

    def to_list(self) -> list[int | None]:
        return [self._next, *sorted(self._returned | self._dealt)]

    def restore(self, values: Sequence[int | None]) -> None:
        self._next, self._dealt = values[0], set()
        self._returned = {clock for clock in values[1:] if clock is not None}

    def _after(self, clock: int) -> int:
        return min(self._last, clock - clock % self._every + self._every) if self._every else self._last
