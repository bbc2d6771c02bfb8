"""An update at a server: applied, written down, and put into the outboxes of those who follow, in one order for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from paceline.errors import ExchangeError
from paceline.exchange.server.entry import Entry
from paceline.exchange.server.outlets import Outlets
from paceline.exchange.server.replica import Replica
from paceline.exchange.server.requests import Broken
from paceline.exchange.server.standing import Standing
from paceline.exchange.shard.log import Record
from paceline.exchange.shard.together import RowPush, apply_together
from paceline.exchange.updates import Applied, Update

Observer: TypeAlias = Callable[[Sequence[Record]], None]
"""Told of updates that were applied here, under the lock and before anybody can see them."""


class Applying:
    """Applies updates to replicas. Under the lock.

    Args:
        standing: of this server.
        outlets: to its successors.
        applied: see `Observer`.
    """

    def __init__(self, standing: Standing, outlets: Outlets, applied: Observer) -> None:
        self._standing, self._outlets, self._applied = standing, outlets, applied

    def apply(self, updates: Sequence[tuple[Replica, Entry, Update]]) -> list[Applied]:
        """Apply updates, write them down, and hand them on.

        Raises:
            Broken: they could not be written down; this server has nothing any more.
        """
        done = [replica.shard.apply(update) for replica, _, update in updates]
        new = [
            (replica, entry.kept(applied.position) if replica.hands_on else entry, applied)
            for (replica, entry, _), applied in zip(updates, done, strict=True)
            if not applied.repeated
        ]
        if new:
            self._write_down([_record(self._standing.epoch, entry, applied) for _, entry, applied in new])
        for replica, entry, _ in new:
            if replica.hands_on:
                self._outlets.hand(replica, entry)
        return done

    def apply_rows(self, replicas: Sequence[Replica], push: RowPush, entries: Sequence[Entry]) -> list[Applied] | None:
        """Do as `apply` with a simple push, in one go; None, and nothing done: it cannot be.

        Args:
            replicas: of the shards of its reads, in their order.
            push: what is applied.
            entries: the same for those to whom it is handed; none where it is for nobody.

        Raises:
            Broken: as `apply`.
        """
        done = apply_together({replica.shard.number: replica.shard for replica in replicas}, push)
        if done is None:
            return None
        epoch, (worker, sequence, tasks, reads, _) = self._standing.epoch, push
        self._write_down(
            [
                Record(epoch, shard, position, worker, sequence, staleness, tasks)
                for shard, (position, staleness, _) in zip(reads, done, strict=True)
            ]
        )
        for replica, entry, applied in zip(replicas, entries, done, strict=False):
            if replica.hands_on:
                self._outlets.hand(replica, entry.kept(applied.position))
        return done

    def _write_down(self, records: Sequence[Record]) -> None:
        """Tell of updates that were applied; where that fails others take over, from what they have."""
        try:
            self._applied(records)
        except ExchangeError as error:
            self._outlets.clear()
            self._standing.drop()
            raise Broken(error) from error


def _record(epoch: int, entry: Entry, applied: Applied) -> Record:
    return Record(epoch, entry.shard, applied.position, entry.worker, entry.sequence, applied.staleness, entry.tasks)
