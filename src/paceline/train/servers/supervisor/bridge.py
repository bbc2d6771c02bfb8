"""A bridge between the servers of a group and the global ones: every few steps they meet.

A group goes on by itself; at a meeting what it has moved since the last one is added to the global parameters, by its
share, and what the other groups have moved comes back to it. (Elastic averaging, Zhang et al., 2015, with the whole
difference.) Meetings are the tasks of the global job, so that no group runs far ahead of another.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.client.client import ServerExchange
from paceline.exchange.directory import Directory
from paceline.exchange.interface import Dealer, Exchange, Order
from paceline.exchange.job import Job
from paceline.exchange.membership.member import Member
from paceline.exchange.membership.observer import Observer
from paceline.exchange.membership.seats import Role
from paceline.exchange.shard.manifest import whole_snapshots
from paceline.exchange.shard.whole import read_tables
from paceline.train.rundir import RunDirectory
from paceline.train.servers.processes.children import end_with
from paceline.train.servers.rundir import exchange_of

_POLL_S: Final = 0.02

log = logging.getLogger("paceline")


class Bridge:
    """Meets the global servers for a group.

    Args:
        above: the global parameters.
        dealer: deals meetings.
        share: what a group's movement counts by.
        began: what all began with, by table.
    """

    def __init__(self, above: Exchange, dealer: Dealer, share: float, began: Sequence[Tensor]) -> None:
        self._above = above
        self._dealer = dealer
        self._share = share
        self._met = [value.clone() for value in began]  # after the last meeting, without the group's steps since
        self._tables = range(len(began))

    def meet(self, group: Exchange) -> None:
        """Add what the group has moved to the global parameters, and what others have moved to the group's."""
        here = [torch.empty_like(value) for value in self._met]
        group.pull(self._tables, here, 0)
        there = self._exchanged(here)
        group.push([], {table: there[table] - here[table] for table in self._tables}, {})
        group.flush()

    def part(self, last: Sequence[Tensor], all_have_met: Callable[[], bool]) -> None:
        """Meet for the last time, with what the group held at its end; return at the end of the global job.

        Args:
            last: by table.
            all_have_met: whether all meetings of all groups are done; who asks before is dealt one of another group.
        """
        self._exchanged(last)
        while not all_have_met():
            time.sleep(_POLL_S)
        while (deal := self._dealer.next_task()).order is not Order.END:
            if deal.order is Order.EVALUATE:  # groups look at what they have learnt themselves
                self._dealer.done([deal])
            time.sleep(_POLL_S)

    def _exchanged(self, here: Sequence[Tensor]) -> Sequence[Tensor]:
        """Do the next meeting; return the global parameters with what the group has moved."""
        while (deal := self._dealer.next_task()).order is not Order.TASK:
            time.sleep(_POLL_S)
        there = [torch.empty_like(value) for value in self._met]
        self._above.pull(self._tables, there, self._above.job.clock(deal.number))
        # Servers subtract, at a rate of 1.
        moved = {table: (self._met[table] - here[table]) * self._share for table in self._tables}
        self._above.push([deal.number], moved, {})
        self._above.flush()
        self._dealer.done([deal])
        self._met = [value - moved[table] for table, value in enumerate(there)]
        return self._met


class _Group:
    """The job of a group, as its bridge sees it."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.charter, self.secret = directory.read(), directory.read_secret()
        self._observer = Observer(self.charter, self.secret)

    def wait(self, clock: int) -> None:
        """Return once all tasks of clocks below `clock` are done; for the last clock, once all is written."""
        terms = self.charter.terms
        is_last = clock * self.charter.job.pieces >= terms.tasks
        while True:
            try:
                status = self._observer.status()
            except ConnectionLost:  # it is being started again
                time.sleep(_POLL_S)
                continue
            if status["state"] == "failed":
                raise ExchangeError(f"the group failed: {status['why']}")
            if status["state"] == "finished" or (not is_last and status["tasks"]["clock"] >= clock):
                return
            time.sleep(_POLL_S)

    def last(self) -> list[Tensor]:
        """Return what it held at its end."""
        job, numbers = self.charter.job, whole_snapshots(self.directory.snapshots)
        return self._values(job, numbers[-1])

    def first(self) -> list[Tensor]:
        """Return what it began with."""
        return self._values(self.charter.job, self.charter.terms.restored)

    def _values(self, job: Job, snapshot: int) -> list[Tensor]:
        dense = read_tables(self.directory.snapshot(snapshot), job).dense
        return [dense[table.name] for table in job.tables]


def bridge(run: RunDirectory, number: int, groups: int, every: int) -> None:
    """Be the bridge of a group until its run ends.

    Args:
        run: directory.
        number: of the group.
        groups: how many there are.
        every: clocks between meetings.
    """
    group, above = _Group(exchange_of(run, number)), exchange_of(run)
    charter, secret = above.read(), above.read_secret()
    inside = Member.join(group.charter, group.secret, Role.WORKER)
    outside = Member.join(charter, secret, Role.WORKER)
    here = ServerExchange(group.charter, inside, group.secret)
    there = ServerExchange(charter, outside, secret)
    made = Bridge(there, outside, 1 / groups, group.first())
    clocks = group.charter.terms.tasks // group.charter.job.pieces
    for clock in range(every, clocks, every):
        group.wait(clock)
        made.meet(here)
        log.info("met after step %d", clock)
    group.wait(clocks)
    here.close()
    inside.close()
    over = Observer(charter, secret)

    def all_have_met() -> bool:
        with suppress(ConnectionLost):  # the coordinator is being started again
            tasks = over.status()["tasks"]
            return bool(tasks["done"] == tasks["total"])
        return False

    made.part(group.last(), all_have_met)
    there.close()
    outside.leave()


def main() -> None:
    """Be a bridge; what is wrong is in the log, and in the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    for name in ("--group", "--groups", "--every"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_with(lambda: bridge(RunDirectory(given.run), given.group, given.groups, given.every))


if __name__ == "__main__":
    main()
