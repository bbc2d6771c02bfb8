"""Reads of the shards of a server: each of one position of them, and only of what is committed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from torch import Tensor

from paceline.exchange.job import Job
from paceline.exchange.server.reads import committed, shares_of, value_of
from paceline.exchange.server.replica import Replica
from paceline.exchange.server.requests import Changed, Found, NotYet, Read
from paceline.exchange.server.standing import NEWER_VIEW_S, Standing


class Answering:
    """Answers reads of shards whose tail this server is. It takes the lock.

    Args:
        job: what is kept.
        standing: of this server.

    Attributes:
        hurried: no read waits for its clocks; under the lock.
    """

    def __init__(self, job: Job, standing: Standing) -> None:
        self.hurried = False
        self._job: Final = job
        self._standing: Final = standing

    def read(self, epoch: int, clock: int, reads: Sequence[Read], patience_s: float) -> Found:
        """Return what is asked for, all of one moment.

        Raises:
            Refused: it is of another epoch, or of shards that others answer for.
            NotYet: the clocks did not allow it within `patience_s`.
            ExchangeError: what is asked for is not what there is.
        """
        with self._standing.lock:
            tails = self._readable(epoch, clock, reads, time.monotonic() + patience_s)
            values = [value_of(read, tails) for read in reads]
            return self._found(epoch, tails, values)

    def changed(self, epoch: int, wanted: Sequence[Changed], other_than: int) -> Found:
        """Return keys of rows that were changed, for each that is wanted, all of one moment; see `Shard.changed`.

        Raises:
            Refused: it is of another epoch, or of shards that others answer for.
            ExchangeError: nothing is noted of a table.
        """
        with self._standing.lock:
            self._standing.enter(epoch)
            tails = {one.shard: self._standing.tail(one.shard) for one in wanted}
            keys = [tails[one.shard].shard.changed(one.table, one.since, other_than) for one in wanted]
            return self._found(epoch, tails, keys)

    def norms(self, epoch: int, clock: int, shards: Sequence[int]) -> Found:
        """Return what shards know of the norm of a clock's gradient: see `reads.shares_of`. Refused as `changed` is."""
        with self._standing.lock:
            self._standing.enter(epoch)
            tails = {shard: self._standing.tail(shard) for shard in shards}
            return self._found(epoch, tails, shares_of(clock, list(tails.values())))

    def _found(self, epoch: int, tails: Mapping[int, Replica], values: list[Tensor]) -> Found:
        """Return what was read of replicas once that is committed."""
        standing = self._standing
        positions = {shard: replica.shard.position for shard, replica in tails.items()}
        # Where a replica in the making counts already, nobody may see what it lacks: soon it may be all that stays.
        standing.changed.wait_for(lambda: epoch != standing.epoch or committed(tails, positions), NEWER_VIEW_S)
        if committed(tails, positions):
            return Found(positions, values)
        standing.enter(epoch)
        raise NotYet(())

    def _readable(self, epoch: int, clock: int, reads: Sequence[Read], until: float) -> dict[int, Replica]:
        """Wait until the clocks allow all of the reads; return the replicas that they are of."""
        while True:
            self._standing.enter(epoch)
            tails = {
                shard: self._standing.tail(shard)
                for shard in dict.fromkeys(chain.from_iterable(read.shards for read in reads))
            }
            early = [
                (read.table, tails[shard].shard)
                for read in reads
                if self._job.tables[read.table].consistency.bound is not None
                for shard in read.shards
                if not tails[shard].shard.ready(read.table, clock)
            ]
            if not early:
                return tails
            left = 0.0 if self.hurried else until - time.monotonic()
            if left <= 0 or not self._standing.changed.wait(left):
                raise NotYet(sorted({task for table, shard in early for task in shard.missing(table, clock)}))
