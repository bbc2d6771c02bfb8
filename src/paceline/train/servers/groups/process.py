"""The process that bridges a group: `python -m paceline.train.servers.groups.process RUN_DIR --group N ...`.

It holds nothing that is not written down, so that another may follow it at any moment.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.client.client import ServerExchange
from paceline.exchange.directory import Directory
from paceline.exchange.interface import Deal, Order
from paceline.exchange.membership.member import Fenced, Member
from paceline.exchange.membership.observer import Observer
from paceline.exchange.membership.seats import Role
from paceline.exchange.shard.manifest import whole_snapshots
from paceline.exchange.shard.whole import read_tables
from paceline.train.rundir import RunDirectory
from paceline.train.servers.groups import cuts
from paceline.train.servers.groups.bridge import Bridge, bridge_id, task_of
from paceline.train.servers.groups.ledger import Ledger
from paceline.train.servers.groups.meeting import Kind
from paceline.train.servers.groups.offline import held
from paceline.train.servers.groups.side import Over, Seated, Servers
from paceline.train.servers.processes.children import START_AGAIN, end_with
from paceline.train.servers.rundir import exchange_of

_POLL_S: Final = 0.02
_DONE: Final = (Kind.LAST, Kind.NOTHING)

log = logging.getLogger("paceline")


class _Exchange:
    """An exchange, as a bridge sees it from outside.

    Args:
        directory: of it.
        check: called again and again while something is waited for; raises where this process may go on no longer.
    """

    def __init__(self, directory: Directory, check: Callable[[], None]) -> None:
        self.directory = directory
        self._check = check
        self.charter, self.secret = directory.read(), directory.read_secret()
        self._observer = Observer(self.charter, self.secret)

    @property
    def clocks(self) -> int:
        """Of the whole job."""
        return self.charter.terms.tasks // self.charter.job.pieces

    def until(self, reached: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
        """Return how it is once that is so; see `Observer.status`.

        Raises:
            ExchangeError: the job failed.
        """
        while True:
            self._check()
            with suppress(ConnectionLost):  # it is being started again
                status = self._observer.status()
                if status["state"] == "failed":
                    raise ExchangeError(f"the job in {self.directory.root} failed: {status['why']}")
                if reached(status):
                    return status
            time.sleep(_POLL_S)

    def wait(self, clock: int) -> bool:
        """Return once all tasks of clocks below `clock` are done, or all there are, and whether there are more.

        Once there are none, the snapshot of the end may have been taken, and a meeting would be after that.
        """
        wanted = min(clock, self.clocks)
        status = self.until(lambda now: bool(now["tasks"]["clock"] >= wanted))
        return bool(status["tasks"]["clock"] < self.clocks)

    def join(self, id: int, pushed: int) -> tuple[Member, ServerExchange]:
        """Become a member that pushes under an id; pushed: so many times before."""
        member = Member.join(self.charter, self.secret, Role.WORKER)
        return member, ServerExchange(self.charter, Seated(member, id), self.secret, outstanding=0, pushed=pushed)


class _Leaving:
    """Whether this process was asked to leave. It does so at once, but for what was agreed on and is being pushed."""

    def __init__(self) -> None:
        self._asked = self._busy = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def __enter__(self) -> None:
        self._busy = True

    def __exit__(self, *_: object) -> None:
        self._busy = False
        if self._asked:
            os._exit(0)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if not self._busy:
            os._exit(0)


class Life:
    """Bridges a group from its last meeting on.

    Args:
        run: directory.
        group: its number.
        groups: how many there are.
        every: clocks between meetings.
        leaving: whether to leave.
    """

    def __init__(self, run: RunDirectory, group: int, groups: int, every: int, leaving: _Leaving) -> None:
        self._group, self._groups, self._every, self._leaving = group, groups, every, leaving
        self._members: list[Member] = []
        self._below = _Exchange(exchange_of(run, group), self._check)
        self._above = _Exchange(exchange_of(run), self._check)
        self._ledger = Ledger(self._below.directory.root, logged=self._below.charter.log)
        last = self._ledger.last()
        pushed = last.number - (last.kind is not Kind.BEGAN)
        self._member, self._exchange = self._above.join(bridge_id(group), pushed)
        self._members.append(self._member)
        self._bridge = Bridge(group, groups, Servers(self._exchange, last.above), self._ledger)
        self._pushed = pushed

    @property
    def _number(self) -> int:
        return self._bridge.last.number

    def run(self) -> None:
        """Meet until the run ends."""
        with suppress(Over):
            if self._bridge.last.kind not in _DONE:
                self._while_it_goes_on()
        self._below.until(lambda now: bool(now["state"] == "finished"))
        self._after_its_end()
        self._part()

    def _while_it_goes_on(self) -> None:
        member, exchange = self._below.join(bridge_id(self._group), self._pushed)
        self._members.append(member)
        inside = Servers(exchange, self._bridge.last.inside)
        try:
            with self._leaving:
                self._bridge.settle(inside)
            self._met()
            while self._below.wait((self._number + 1) * self._every):
                self._let_others_come()
                began = time.monotonic()
                with self._leaving:
                    self._bridge.meet(inside)
                took_s = time.monotonic() - began
                log.info("meeting %d, after step %d, took %.3f s", self._number, self._number * self._every, took_s)
                member.report(exchange.figures())
                self._met()
        finally:
            exchange.close()
            self._members.remove(member)
            member.close()

    def _check(self) -> None:
        """Raise where a member was given up: what it says is not heard any more."""
        if any(member.fenced for member in self._members):
            raise Fenced("the bridge was not heard of for a lease.")

    def _after_its_end(self) -> None:
        """Meet with what the group held at its end, then let all others pass."""
        with self._leaving:
            self._bridge.settle(None)
        if self._bridge.last.kind not in _DONE:
            self._let_others_come()
            job = self._below.charter.job
            snapshot = cuts.end_of(self._below.directory, job, self._group)
            with self._leaving:
                self._bridge.meet_last(*held(read_tables(snapshot, job), job))
            log.info("meeting %d, at the end of the group", self._number)
        self._met()
        while self._number < self._above.clocks:
            self._let_others_come()
            with self._leaving:
                self._bridge.pass_over()
            self._met()

    def _let_others_come(self) -> None:
        """Return when the next meeting is not too far ahead of others'."""
        number = self._number
        if self._is_kept(number):  # and there is no other meeting before that can be gone on from
            self._above.until(lambda now: any(one["clock"] >= number for one in now["snapshots"]))
        self._above.wait(number - 1)

    def _is_kept(self, number: int) -> bool:
        every = self._above.charter.terms.snapshot_every
        return bool(every) and number % every == 0 and number > self._bridge.last.base

    def _met(self) -> None:
        """Keep a snapshot of the group, if that is due, and say that the meeting is done."""
        last, directory = self._bridge.last, self._below.directory
        if last.kind in _DONE:
            cuts.keep(directory, cuts.end_of(directory, self._below.charter.job, self._group))
        elif self._is_kept(last.number) and last.number not in cuts.kept(directory):
            self._keep(last.number)
        first = self._above.charter.job.clock(self._above.charter.terms.first_task)
        self._member.report(self._exchange.figures())
        tasks = (task_of(number, self._group, self._groups) for number in range(first + 1, last.number + 1))
        self._member.done([Deal(Order.TASK, task) for task in tasks])

    def _keep(self, number: int) -> None:
        """Keep a snapshot of the group with this meeting; none if it could not be written until the next is due."""
        clock, next_clock = number * self._every, number * self._every + self._below.charter.terms.snapshot_every
        directory = self._below.directory

        def is_settled(now: Mapping[str, Any]) -> bool:
            at = now["tasks"]["clock"]
            return bool(now["state"] == "finished" or _newest_clock(now) >= clock or at >= next_clock)

        status = self._below.until(is_settled)
        while status["state"] == "finished" or _newest_clock(status) >= clock:
            with suppress(FileNotFoundError):  # it was deleted for a newer one
                cuts.keep(directory, directory.snapshot(whole_snapshots(directory.snapshots)[-1]))
                return
        log.warning("there is no snapshot of the group after step %d to go on from", clock)

    def _part(self) -> None:
        """Return when all groups have met for the last time."""
        self._above.until(lambda now: bool(now["tasks"]["done"] == now["tasks"]["total"]))
        while (deal := self._member.next_task()).order is not Order.END:
            if deal.order is Order.EVALUATE:  # groups look at what they have learnt themselves
                self._member.done([deal])
            time.sleep(_POLL_S)
        self._member.leave()


def _newest_clock(status: Mapping[str, Any]) -> int:
    """Return the clock of the newest snapshot that the coordinator tells of."""
    return max((int(one["clock"]) for one in status["snapshots"]), default=-1)


def main() -> None:
    """Be a bridge; what is wrong is in the log, and in the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    for name in ("--group", "--groups", "--every"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def live() -> None:
        leaving = _Leaving()
        try:
            Life(RunDirectory(given.run), given.group, given.groups, given.every, leaving).run()
        except Fenced as error:
            log.warning("the bridge stood still and was given up: it begins anew (%s)", error)
            raise SystemExit(START_AGAIN) from error

    end_with(live)


if __name__ == "__main__":
    main()
