"""What comes next, looked for while a task is computed: who deals is asked, samples are loaded, reads are begun.

A worker looks ahead only once all that it reads for the task at hand has come: what it is dealt then may be a task
that others wait for, and by then it waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from paceline.exchange.interface import Arrivals, Deal, Dealer, Order
from paceline.exchange.job import Job
from paceline.train.data import MicroBatch
from paceline.train.servers.worker.computer import Computer, Prepared
from paceline.train.servers.worker.reading import Early, Reader


@dataclass(frozen=True)
class Coming:
    """What a worker does next.

    Attributes:
        deal: the order.
        prepared: samples of a task.
        early: what is on its way for it.
    """

    deal: Deal
    prepared: Prepared | None = None
    early: Early | None = None


class Aside(Protocol):
    """Where a worker looks ahead."""

    def submit(self, look: Callable[[], Coming]) -> Future[Coming]:
        """Have this done; who asks for the result waits for it."""
        ...

    def close(self) -> None:
        """End; nobody asks for a result any more."""
        ...


class AtOnce:
    """Looks ahead before it computes: as a replay does, in which one thing happens at a time."""

    def submit(self, look: Callable[[], Coming]) -> Future[Coming]:
        """See `Aside`."""
        done: Future[Coming] = Future()
        try:
            done.set_result(look())
        except Exception as error:  # told to who asks, as it is from a thread
            done.set_exception(error)
        return done

    def close(self) -> None:
        """See `Aside`."""


class InThread:
    """Looks ahead while it computes."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "ahead")

    def submit(self, look: Callable[[], Coming]) -> Future[Coming]:
        """See `Aside`."""
        return self._threads.submit(look)

    def close(self) -> None:
        """See `Aside`. What it waits for, if anything, may end later."""
        self._threads.shutdown(wait=False)

    def end(self) -> None:
        """Return when nothing is done any more."""
        self._threads.shutdown()


class Lookout:
    """Knows what a worker does next.

    Args:
        job: for the clocks of tasks.
        dealer: deals tasks.
        computer: makes samples ready.
        portions: returns the samples of a task.
        reader: begins reads.
        aside: where all this is done ahead.
    """

    def __init__(
        self,
        job: Job,
        dealer: Dealer,
        computer: Computer,
        portions: Callable[[int], Sequence[MicroBatch]],
        reader: Reader,
        aside: Aside,
    ) -> None:
        self._job, self._dealer, self._computer, self._portions = job, dealer, computer, portions
        self._reader, self._aside = reader, aside
        self._ahead: Future[Coming] | None = None

    def begin(self) -> None:
        """Look ahead; nothing is read by the worker itself until `take`."""
        if self._ahead is None:
            self._ahead = self._aside.submit(self._look)

    def take(self) -> Coming | None:
        """Return what was seen, once; None where nobody looked."""
        ahead, self._ahead = self._ahead, None
        return None if ahead is None else ahead.result()

    def prepared(self, coming: Coming) -> Prepared:
        """Return the samples of a task."""
        return coming.prepared or self._computer.prepare(self._portions(coming.deal.number))

    def close(self) -> None:
        """Look no more."""
        self._aside.close()

    def _look(self) -> Coming:
        deal = self._dealer.next_task()
        if deal.order is not Order.TASK:
            return Coming(deal)
        prepared = self._computer.prepare(self._portions(deal.number))
        early = None if deal.alone else self._reader.begin(prepared, self._job.clock(deal.number))
        return Coming(deal, prepared, early)


class Awaited:
    """Dense tables on their way, and what is done when the last of them has come; an `interface.Arrivals`.

    Args:
        arrivals: the tables.
        tables: all of them.
        then: called once.
    """

    def __init__(self, arrivals: Arrivals, tables: Sequence[int], then: Callable[[], None]) -> None:
        self._arrivals, self._then = arrivals, then
        self._left = set(tables)

    def wait(self, table: int) -> None:
        """See `interface.Arrivals`."""
        self._arrivals.wait(table)
        if table in self._left:
            self._left.discard(table)
            if not self._left:
                self._then()

    def wait_for_all(self) -> None:
        """Return once all have come: also those that nobody used."""
        for table in sorted(self._left):
            self.wait(table)
