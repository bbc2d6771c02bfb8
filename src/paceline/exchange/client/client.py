"""The servers as a worker sees them: `interface.Fetching` over connections."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from torch import Tensor

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.client import errands
from paceline.exchange.client.actions import ActionLog, LoggedDealer
from paceline.exchange.client.changed import Changed, Changes
from paceline.exchange.client.closing import close
from paceline.exchange.client.errands import Errands
from paceline.exchange.client.fetch import Arriving, Fetch, Fetcher, in_order
from paceline.exchange.client.figures import Figures
from paceline.exchange.client.links import Links
from paceline.exchange.client.outgoing import Compressor, Cutter
from paceline.exchange.client.pulls import Pull, wanted
from paceline.exchange.client.pushes import Push
from paceline.exchange.client.reads import ReadPositions
from paceline.exchange.client.routes import DenseRoutes
from paceline.exchange.directory import Directory
from paceline.exchange.interface import NO_ROWS, Dealer, Interrupted, Rows, RowsWanted
from paceline.exchange.job import Job
from paceline.exchange.membership.member import Fenced
from paceline.exchange.terms import Charter
from paceline.exchange.view import Address, View
from paceline.exchange.wire.connect import connect
from paceline.exchange.wire.frame import Connection

_OUTSTANDING: Final = 2
"""Pushes under way where no table is synchronous: one is applied while the next is computed and sent."""


class Membership(errands.Membership, Protocol):
    """What is asked of `membership.member.Member`."""

    @property
    def id(self) -> int:
        """Of this worker."""
        ...

    @property
    def fenced(self) -> bool:
        """Whether this worker was given up, and its tasks given to others."""
        ...

    @property
    def failure(self) -> str:
        """Why the job failed; empty where it did not."""
        ...

    def on_view(self, callback: Callable[[View], None]) -> None:
        """Have a function called with each new view, from another thread, once `view` is that view."""
        ...


class ServerExchange:
    """Parameters on servers; see `interface.Fetching`. For one thread.

    Args:
        charter: of the job.
        member: this worker.
        secret: shared by the processes of the job.
        directory: of the exchange; where the worker's actions are logged, if the charter asks for that.
        compression: what gradients go through; None: they go as they are.
        outstanding: pushes that may be unacknowledged when `push` returns. By default none where a table is
            synchronous, as the next read would wait for them; otherwise 2. Gradients are copied if there are any.
        pushed: pushes that were made under this worker's id before: the next has the number after.

    Attributes:
        positions: of each shard that the last read asked.
    """

    def __init__(
        self,
        charter: Charter,
        member: Membership,
        secret: bytes,
        directory: Directory | None = None,
        compression: Compressor | None = None,
        outstanding: int | None = None,
        pushed: int = 0,
    ) -> None:
        self._job, self._member = charter.job, member
        self._closed = False
        synchronous = any(map(charter.job.is_synchronous, range(len(charter.job.tables))))
        self._window = outstanding if outstanding is not None else 0 if synchronous else _OUTSTANDING
        self._routes = DenseRoutes(charter.job)
        self._compression = compression
        self._cutter = Cutter(charter.job, self._routes, compression)
        self._reads = ReadPositions()
        self._number, self._sequence = 0, pushed
        self.positions: Mapping[int, int] = {}
        self._outstanding: deque[Push] = deque()
        self._figures = Figures()
        logged = charter.log and directory is not None
        self._log: ActionLog | None = None
        if directory is not None and logged:
            self._log = ActionLog(directory.actions(member.id), member.id, durable=charter.durable)
        patience_s = max(1.0, charter.terms.lease_s)

        def reach(address: Address) -> Connection:
            return connect(address, secret, transport=charter.transport, streams=charter.streams, timeout_s=patience_s)

        self._links = Links(member.id, reach, lambda: member.view)
        self._fetch_links = Links(member.id, reach, lambda: member.view)
        self._errands = Errands(member, self._links, self._check, self._figures.awaited)
        self._fetcher: Fetcher | None = None
        member.on_view(self._adopt)

    @property
    def job(self) -> Job:
        """See `interface.Exchange`."""
        return self._job

    def logged(self, dealer: Dealer) -> Dealer:
        """Return a dealer whose deals are written to the log of actions, if there is one: the one to work for."""
        return dealer if self._log is None else LoggedDealer(dealer, self._log)

    def pull(self, tables: Sequence[int], out: Sequence[Tensor], clock: int) -> None:
        """See `interface.Exchange`."""
        self.pull_together(tables, out, clock, NO_ROWS)

    def pull_rows(self, table: int, keys: Tensor, out: Tensor, clock: int) -> None:
        """See `interface.Exchange`."""
        self.pull_together((), (), clock, {table: (keys, out)})

    def pull_together(self, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted) -> None:
        """See `interface.Fetching`."""
        self._check()
        pull = self._pull(tables, out, clock, rows)
        self._errands.begin(pull)
        try:
            self._finish(self._errands, pull, lambda: self._settle(0))
        except Interrupted:
            self._drain()
            raise
        self._taken(pull)

    def fetch(self, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted = NO_ROWS) -> Fetch:
        """See `interface.Fetching`."""
        self._check()
        fetch = Fetch(self._pull(tables, out, clock, rows), lambda: self._settle(0), self._drain, self._taken)
        if self._fetcher is None:
            of_its_own = Errands(self._member, self._fetch_links, self._check, self._figures.awaited)
            self._fetcher = Fetcher(of_its_own, self._finish)
        self._fetcher.begin(fetch)
        return fetch

    def pull_in_order(self, tables: Sequence[int], out: Sequence[Tensor], clock: int) -> Arriving:
        """See `interface.Fetching`."""
        return in_order(lambda some, places: self.fetch(some, places, clock), tables, out)

    def changed(self, tables: Sequence[int], since: Sequence[int]) -> Changed:
        """Return rows that tasks of others have changed, and maybe some more; the job is one that notes changes.

        Args:
            tables: sparse ones.
            since: of each shard the position after which; -1: all rows that there are.
        """
        self._check()
        asked = Changes(self._member.id, tables, since)
        self._errands.begin(asked)
        self._errands.finish(asked, lambda: self._settle(0))
        return asked.found

    def forget(self) -> None:
        """See `interface.Exchange`."""
        self._reads.forget()

    def push(
        self, tasks: Sequence[int], dense: Mapping[int, Tensor], rows: Mapping[int, Rows], weight: float = 1.0
    ) -> float | None:
        """See `interface.Exchange`."""
        self._check()
        began = time.monotonic()
        outgoing = self._cutter.cut(dense, rows, keep=self._window > 0)
        reads = self._reads.pushed({*dense, *rows}, self._job.shards)
        self._sequence += 1
        if self._log is not None:
            self._log.pushes(self._sequence, tasks)
        push = Push(self._member.id, self._sequence, tasks, weight, reads, outgoing)
        self._errands.begin(push)
        self._outstanding.append(push)
        closes = self._job.closes_steps and len(tasks) > 0
        self._settle(0 if closes else self._window)
        norm = close(self._job, self._errands, self._job.clock(tasks[0])) if closes else None
        self._figures.pushed(time.monotonic() - began, sum(len(given.keys) for given in rows.values()))
        return None if self._job.clip is None else norm

    def flush(self) -> None:
        """See `interface.Exchange`."""
        self._settle(0)

    def figures(self) -> dict[str, Any]:
        """Return what was counted: see `figures.Figures.to_dict`; bytes, compression, pushes under way."""
        both = (self._links, self._fetch_links)
        made = self._compression and self._compression.figures
        return {
            **self._figures.to_dict(),
            **({"compression_ratio": made.ratio, "compression_s": made.seconds} if made else {}),
            "sent_bytes": sum(links.sent_bytes for links in both),
            "received_bytes": sum(links.received_bytes for links in both),
            "outstanding": len(self._outstanding),
        }

    def close(self) -> None:
        """See `interface.Exchange`. Pushes that are not acknowledged are given up; may be called twice."""
        self._closed = True
        self._links.close()
        self._fetch_links.close()
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None
        if self._log is not None:
            self._log.close()

    def _pull(self, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted) -> Pull:
        what = wanted(self._job, self._routes, tables, out, rows)
        self._number += 1
        return Pull(self._number, what, clock)

    def _finish(self, of: Errands, pull: Pull, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for a read and write it down."""
        began = time.monotonic()
        try:
            of.finish(pull, meanwhile)
        except Interrupted:
            if self._log is not None:
                self._log.interrupted(pull.number)
            raise
        if self._log is not None:
            self._log.pulled(pull.number, pull.positions)
        self._figures.pulled(time.monotonic() - began, pull.rows, pull.waited_s)

    def _drain(self) -> None:
        """Return when no read is under way beside this thread."""
        if self._fetcher is not None:
            self._fetcher.drain()

    def _taken(self, pull: Pull) -> None:
        self.positions = pull.positions
        self._reads.read(pull.tables, pull.positions)

    def _settle(self, left: int) -> None:
        """Wait until no more than `left` pushes are unacknowledged."""
        while len(self._outstanding) > left:
            push = self._outstanding[0]
            self._errands.finish(push)
            self._outstanding.popleft()
            self._cutter.done(push.outgoing)
            self._figures.acknowledged(push.staleness.values())

    def _adopt(self, view: View) -> None:
        """Wait no longer for servers that are gone."""
        self._links.keep(view.servers)
        self._fetch_links.keep(view.servers)

    def _check(self) -> None:
        if self._closed:
            raise ConnectionLost("the exchange was closed.")
        if self._member.fenced:
            raise Fenced(
                f"worker {self._member.id} was given up because it was not heard of; its tasks are done by others. "
                "It may join again, as a new worker."
            )
        if self._member.failure:
            raise ExchangeError(f"the job has failed: {self._member.failure}")
