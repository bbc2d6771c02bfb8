"""What a worker sees in a replay, in the place of servers and of who deals tasks: what its log says they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.client.actions import Actions
from paceline.exchange.client.fetch import Arriving, in_order
from paceline.exchange.client.outgoing import Compressor, Cutter
from paceline.exchange.client.pulls import Pull, wanted
from paceline.exchange.client.pushes import Push
from paceline.exchange.client.reads import ReadPositions
from paceline.exchange.client.routes import DenseRoutes
from paceline.exchange.interface import NO_ROWS, Deal, Interrupted, Order, Pending, Rows, RowsWanted
from paceline.exchange.job import Job
from paceline.exchange.replay.baton import Ended, Runner
from paceline.exchange.replay.serial import Lines
from paceline.exchange.server.entry import pushed
from paceline.exchange.shard.shard import Shard


class ReplayedDealer:
    """Deals what was dealt, then says that this was all. See `interface.Dealer`.

    A worker that was asked to leave pushed what it still had, and so it does here; one that was killed did not, and
    comes to a push that is not in its log.
    """

    def __init__(self, actions: Actions) -> None:
        self._deals: Iterator[Deal] = iter(actions.deals)

    def next_task(self) -> Deal:
        """See `interface.Dealer`."""
        return next(self._deals, Deal(Order.END))

    def done(self, deals: Sequence[Deal]) -> None:
        """See `interface.Dealer`."""

    def put_back(self, deals: Sequence[Deal]) -> None:
        """See `interface.Dealer`: who did them instead is in the logs."""


class ReplayedExchange:
    """Reads shards at the positions that were read, and offers them what is pushed. See `interface.Fetching`.

    Args:
        job: what is kept.
        actions: what the worker did.
        lines: the shards.
        runner: whose turn it is.
        compression: as the worker had it.
        pushed: updates that it had pushed before the run began.
    """

    def __init__(
        self,
        job: Job,
        actions: Actions,
        lines: Lines,
        runner: Runner,
        compression: Compressor | None = None,
        pushed: int = 0,
    ) -> None:
        self._job, self._actions, self._lines, self._runner = job, actions, lines, runner
        self._routes = DenseRoutes(job)
        self._cutter = Cutter(job, self._routes, compression)
        self._reads = ReadPositions()
        self._begun: list[_Replayed] = []
        self._number, self._sequence = 0, pushed

    @property
    def job(self) -> Job:
        """See `interface.Exchange`."""
        return self._job

    def pull(self, tables: Sequence[int], out: Sequence[Tensor], clock: int) -> None:
        """See `interface.Exchange`."""
        self.fetch(tables, out, clock).wait()

    def pull_rows(self, table: int, keys: Tensor, out: Tensor, clock: int) -> None:
        """See `interface.Exchange`."""
        self.fetch((), (), clock, {table: (keys, out)}).wait()

    def pull_together(self, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted) -> None:
        """See `interface.Fetching`."""
        self.fetch(tables, out, clock, rows).wait()

    def fetch(self, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted = NO_ROWS) -> Pending:
        """See `interface.Fetching`."""
        what = wanted(self._job, self._routes, tables, out, rows)
        self._number += 1
        read = _Replayed(Pull(self._number, what, clock), self._actions, self._lines)
        self._begun = [held for held in self._begun if not held.has_come] + [read]
        return _Pending(read, self._wait)

    def pull_in_order(self, tables: Sequence[int], out: Sequence[Tensor], clock: int) -> Arriving:
        """See `interface.Fetching`."""
        return in_order(lambda some, places: self.fetch(some, places, clock), tables, out)

    def forget(self) -> None:
        """See `interface.Exchange`."""
        self._reads.forget()

    def push(
        self, tasks: Sequence[int], dense: Mapping[int, Tensor], rows: Mapping[int, Rows], weight: float = 1.0
    ) -> None:
        """See `interface.Exchange`."""
        outgoing = self._cutter.cut(dense, rows, keep=True)
        reads = self._reads.pushed({*dense, *rows}, self._job.shards)
        self._sequence += 1
        written = self._actions.pushes.get(self._sequence)
        if written is None:  # it was killed before
            raise Ended
        if written != tuple(tasks):
            raise ExchangeError(
                f"push {self._sequence} of worker {self._actions.worker} was of tasks {list(written)}, and is now of "
                f"{list(tasks)}: its loop does not depend on what it reads and is dealt alone."
            )
        push = Push(self._actions.worker, self._sequence, tasks, weight, reads, outgoing)
        for entry in pushed(push.frame(range(self._job.shards)), self._job, borrowed=False):
            self._lines[entry.shard].offer(entry.update(self._job))

    def flush(self) -> None:
        """See `interface.Exchange`: nothing is under way."""

    def close(self) -> None:
        """See `interface.Exchange`."""

    def end(self) -> None:
        """The worker is through: reads that it did not come to are not waited for."""
        for number, positions in self._actions.pulls.items():
            if number > self._number and positions is not None:
                for shard, position in positions.items():
                    self._lines[shard].forget((position,))

    def _wait(self, read: _Replayed) -> None:
        if read.gave_way:
            self._runner.wait(lambda: all(held.has_come for held in self._begun))
            raise Interrupted
        if read.positions is None:  # it was killed before
            raise Ended
        self._runner.wait(lambda: read.has_come)
        if not read.counted:
            read.counted = True
            self._reads.read(read.pull.tables, read.positions)


class _Replayed:
    """A read, at the positions that are written; what came to no end is not there at all.

    Attributes:
        gave_way: to a task whose worker was gone.
        counted: it was waited for.
    """

    def __init__(self, pull: Pull, actions: Actions, lines: Lines) -> None:
        self.pull = pull
        self.positions = actions.pulls.get(pull.number)
        self.gave_way = self.positions is None and pull.number in actions.pulls
        self.counted = False
        if self.positions is None:
            pull.pending.clear()
            return
        if self.positions.keys() != pull.pending:
            raise ExchangeError(
                f"read {pull.number} of worker {actions.worker} was of shards {sorted(self.positions)}, and is now of "
                f"{sorted(pull.pending)}: its loop does not depend on what it reads and is dealt alone."
            )
        for shard, position in self.positions.items():
            lines[shard].want(position, partial(self._take, shard))

    @property
    def has_come(self) -> bool:
        """Whether nothing of it is missing."""
        return not self.pull.pending

    def _take(self, number: int, shard: Shard) -> None:
        self.pull.read(number, shard)
        self.pull.pending.discard(number)


class _Pending:
    """See `interface.Pending`."""

    def __init__(self, read: _Replayed, wait: Callable[[_Replayed], None]) -> None:
        self._read, self._wait = read, wait

    def wait(self) -> None:
        """See `interface.Pending`."""
        self._wait(self._read)
