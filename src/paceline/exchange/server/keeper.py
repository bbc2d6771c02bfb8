"""All replicas of a server under one lock: what is pushed, handed on, acknowledged and read, in the epoch of one view.

The lock is held while updates are applied, logged and put into outboxes, so that they leave in the order in which they
were applied, and while reads are taken, so that they are of one position. Nothing is sent under it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Final, TypeAlias, TypeVar

from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.job import Job
from paceline.exchange.server.entry import Entry
from paceline.exchange.server.outlet import Outlet
from paceline.exchange.server.outlets import Outlets
from paceline.exchange.server.place import Place, places
from paceline.exchange.server.reads import committed, shares_of, value_of
from paceline.exchange.server.replica import Replica, Upstream, Waiting, check_newest
from paceline.exchange.server.requests import Broken, Changed, Found, NotYet, Read, Refused, Unsure
from paceline.exchange.server.told import Told
from paceline.exchange.shard.log import Record
from paceline.exchange.shard.shard import Shard
from paceline.exchange.shard.together import RowPush, apply_together
from paceline.exchange.updates import Applied, Update
from paceline.exchange.view import Address, Move, Turn, View

_T = TypeVar("_T")

_NEWER_VIEW_S: Final = 2.0
"""How long a request of a later epoch than this server's waits for its view."""

_NO_TAIL: Final = "does not answer for"
_NO_MASTER: Final = "is no master of"


Observer: TypeAlias = Callable[[Sequence[Record]], None]
"""Told of updates that were applied here, under the lock and before anybody can see them."""


class Keeper:
    """The shards of a server.

    Args:
        job: what is kept.
        server: this server's id.
        outlet: makes a way to a successor; its last argument tells whether for copies.
        synced: told of a move from here once its target has all, and of a turn of a head here once its successors
            have all; maybe more than once.
        trusted: whether this process may take itself for a member: it was not stopped for long.
        applied: see `Observer`.
        settled: returns once what `applied` was told is kept; called before anybody else is told.
    """

    def __init__(
        self,
        job: Job,
        server: int,
        *,
        outlet: Callable[[Keeper, int, Address, bool], Outlet],
        synced: Callable[[Move | Turn], None],
        trusted: Callable[[], bool],
        applied: Observer,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self.job: Final = job
        self.server: Final = server
        self.lock: Final = threading.Lock()
        self.replicas: dict[int, Replica] = {}
        self.view = View()
        self._synced, self._trusted, self._applied = synced, trusted, applied
        self._settled = settled
        self._outlets = Outlets(lambda server, address, copying: outlet(self, server, address, copying))
        self._hurried = self._closed = False
        self._viewed = threading.Condition(self.lock)
        self._changed = threading.Condition(self.lock)

    @property
    def epoch(self) -> int:
        """Of the view that this server goes by."""
        return self.view.epoch

    @property
    def held(self) -> frozenset[int]:
        """Shards that are here, if only in the making."""
        with self.lock:
            return frozenset(self.replicas)

    @property
    def outlets(self) -> list[Outlet]:
        """To successors; under the lock."""
        return self._outlets.all

    @property
    def hands_on(self) -> bool:
        """Whether updates must outlive the message that they come in."""
        return bool(self._outlets.all)

    def push(self, epoch: int, entries: Sequence[Entry], updates: Sequence[Update], waiting: Waiting) -> None:
        """Apply a push to its shards, whose master this server is: to all of them or none.

        `waiting` hears of each shard as the update is on all its replicas.

        Raises:
            Refused: it is of another epoch, or of a shard that has another master.
            ExchangeError: it does not fit a shard.
        """
        with self._telling() as told:
            self._enter(epoch)
            replicas = [self._mine(entry.shard, _is_master, _NO_MASTER) for entry in entries]
            for replica, update in zip(replicas, updates, strict=True):
                replica.shard.check(update)
            done = self._apply([*zip(replicas, entries, updates, strict=True)])
            for replica, applied in zip(replicas, done, strict=True):
                self._settle(replica, told)
                replica.wait(applied, waiting)

    def push_rows(self, epoch: int, push: RowPush, entries: Sequence[Entry], waiting: Waiting) -> bool:
        """Do as `push` with a simple one; returns whether it was done.

        entries: the same, in the order of its reads, for whom it is handed to; may be none where it is for nobody.

        Raises:
            Refused: as `push`.
        """
        with self._telling() as told:
            self._enter(epoch)
            replicas = [self._mine(shard, _is_master, _NO_MASTER) for shard in push.reads]
            if not entries and any([replica.place.successor is not None for replica in replicas]):
                return False
            done = apply_together({replica.shard.number: replica.shard for replica in replicas}, push)
            if done is None:
                return False
            worker, sequence, tasks, reads, _ = push
            self._write_down(
                [
                    Record(epoch, shard, position, worker, sequence, staleness, tasks)
                    for shard, (position, staleness, _) in zip(reads, done, strict=True)
                ]
            )
            for replica, entry, applied in zip(replicas, entries, done, strict=False):
                if replica.hands_on:
                    self._outlets.hand(replica, entry.kept(applied.position))
            for replica, applied in zip(replicas, done, strict=True):
                self._settle(replica, told)
                replica.wait(applied, waiting)
            return True

    def hand_on(self, epoch: int, entries: Sequence[Entry], updates: Sequence[Update], upstream: Upstream) -> None:
        """Apply what the predecessor hands on, in its order; what was applied before is passed over.

        Raises:
            Refused: it is of another epoch.
            ConnectionLost: its predecessor has opened a later connection, over which it sends all of it again.
            ExchangeError: this server has another history than its predecessor. It must not go on.
        """
        with self._telling() as told:
            self._enter(epoch)
            shards = list(dict.fromkeys(entry.shard for entry in entries))
            lacking = [shard for shard in shards if shard not in self.replicas]
            if lacking:
                raise ExchangeError(
                    f"in epoch {epoch} server {self.server} was handed shards {lacking}, which it lacks."
                )
            for shard in shards:
                check_newest(upstream, self.replicas[shard].upstream)
            fresh = [
                (self.replicas[entry.shard], entry, update)
                for entry, update in zip(entries, updates, strict=True)
                if entry.position > self.replicas[entry.shard].shard.position
            ]
            for (_, entry, _), applied in zip(fresh, self._apply(fresh), strict=True):
                if applied.repeated or applied.position != entry.position:
                    raise ExchangeError(
                        f"server {self.server} has another history of shard {entry.shard} than its predecessor: what "
                        f"is update {entry.position} there became {applied} here."
                    )
            anew = {entry.shard for _, entry, _ in fresh}
            for shard in shards:
                replica = self.replicas[shard]
                replica.upstream = upstream
                if not self._settle(replica, told) and shard not in anew:
                    told.upstream.append((upstream, (shard, replica.committed)))

    def take_copy(self, epoch: int, move: Move, shard: Shard, upstream: Upstream) -> None:
        """Take a shard that is copied here, whose source is in an epoch.

        Raises:
            Refused: this server is not to have it, or not from there.
            ConnectionLost: it was copied here over a later connection; what this replica has since must not be lost.
        """
        with self._telling() as told:
            self._wait_for_view(epoch)
            place = places(self.view, self.server).get(shard.number)
            if place is None or place.incoming != move:
                raise Refused(self.epoch, f"server {self.server} is not to have shard {shard.number} by {move}")
            if (there := self.replicas.get(shard.number)) is not None:
                check_newest(upstream, there.copied_by)
            replica = self.replicas[shard.number] = Replica(shard, place, upstream)
            told.upstream.append((upstream, (shard.number, replica.committed)))

    def acknowledged(self, server: int, epoch: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Note that a successor, and all after it, had updates up to a position of each shard in an epoch."""
        with self._telling() as told:
            for shard, position in pairs:
                replica = self.replicas.get(shard)
                if replica is None or replica.place.successor != server:
                    continue
                move = replica.place.outgoing
                if move is not None and epoch < move.begun:  # that was of a copy by an earlier move
                    continue
                before = replica.synced
                replica.acknowledge(position)
                if replica.synced and not before and replica.place.outgoing is not None:
                    told.synced.append(replica.place.outgoing)
                self._settle(replica, told)
                told.turned(replica)

    def reconnected(self, server: int, outlet: Outlet) -> None:
        """The way to a successor is open, maybe again: send all that it may not have got; under the lock."""
        self._outlets.reconnected(outlet, self.replicas)

    def read(self, epoch: int, clock: int, reads: Sequence[Read], patience_s: float) -> Found:
        """Return what is asked for, all of one moment.

        Raises:
            Refused: it is of another epoch, or of shards that others answer for.
            NotYet: the clocks did not allow it within `patience_s`.
            ExchangeError: what is asked for is not what there is.
        """
        with self.lock:
            tails = self._readable(epoch, clock, reads, time.monotonic() + patience_s)
            values = [value_of(read, tails) for read in reads]
            return self._found(epoch, tails, values)

    def changed(self, epoch: int, wanted: Sequence[Changed], other_than: int) -> Found:
        """Return keys of rows that were changed, for each that is wanted, all of one moment; see `Shard.changed`.

        Raises:
            Refused: it is of another epoch, or of shards that others answer for.
            ExchangeError: nothing is noted of a table.
        """
        with self.lock:
            self._enter(epoch)
            tails = {one.shard: self._mine(one.shard, lambda place: place.tail, _NO_TAIL) for one in wanted}
            keys = [tails[one.shard].shard.changed(one.table, one.since, other_than) for one in wanted]
            return self._found(epoch, tails, keys)

    def norms(self, epoch: int, clock: int, shards: Sequence[int]) -> Found:
        """Return what shards know of the norm of a clock's gradient: see `reads.shares_of`. Refused as `changed` is."""
        with self.lock:
            self._enter(epoch)
            tails = {shard: self._mine(shard, lambda place: place.tail, _NO_TAIL) for shard in shards}
            return self._found(epoch, tails, shares_of(clock, list(tails.values())))

    def _found(self, epoch: int, tails: Mapping[int, Replica], values: list[Tensor]) -> Found:
        """Return what was read of replicas once that is committed."""
        positions = {shard: replica.shard.position for shard, replica in tails.items()}
        # Where a replica in the making counts already, nobody may see what it lacks: soon it may be all that stays.
        self._changed.wait_for(lambda: epoch != self.epoch or committed(tails, positions), _NEWER_VIEW_S)
        if committed(tails, positions):
            return Found(positions, values)
        self._enter(epoch)
        raise NotYet(())

    def hurry(self, there: bool) -> None:
        """Let no read wait for its clocks, or let them again.

        Args:
            there: whether tasks wait for somebody to do them: whoever waits for those here may have to be the one.
        """
        with self.lock:
            self._hurried = there
            self._changed.notify_all()

    def captured(self, shard: int, clock: int, epoch: int, capture: Callable[[Shard], _T]) -> _T | None:
        """Return what `capture` makes of a shard that has all tasks of clocks below `clock`, between two updates.

        None where this server, which answers for the shard in an epoch, does not do so any more. The view of that epoch
        may still be on its way.
        """
        with self.lock:
            self._changed.wait_for(lambda: self.epoch >= epoch or self._closed)
            while True:
                replica = self.replicas.get(shard)
                if replica is None or not replica.place.tail:
                    return None
                if replica.shard.completed >= clock:
                    return capture(replica.shard)
                self._changed.wait()

    def adopt(self, view: View, loaded: Mapping[int, Shard]) -> None:
        """Go by a new view. loaded: the shards that this server is to hold from the start."""
        with self._telling() as told:
            if view.epoch <= self.epoch or self._closed:
                return
            self.view = view
            wanted = places(view, self.server)
            for shard, replica in list(self.replicas.items()):
                place = wanted.get(shard)
                if place is None or (place.incoming is not None and place.incoming != replica.place.incoming):
                    self.replicas.pop(shard).drop()
                else:
                    replica.take(place)
            for shard, kept in loaded.items():
                self.replicas[shard] = Replica(kept, wanted[shard])
            unneeded = self._outlets.renew(view, self.replicas)
            for replica in self.replicas.values():
                self._settle(replica, told)
                if replica.synced and replica.place.outgoing is not None:  # the coordinator may not have heard it
                    told.synced.append(replica.place.outgoing)
                told.turned(replica)
            self._viewed.notify_all()
        for outlet in unneeded:
            outlet.close()

    def close(self) -> None:
        """Serve no more."""
        with self.lock:
            self._closed = True
            self._drop_all()
            outlets = self._outlets.taken()
            self._changed.notify_all()
        for outlet in outlets:
            outlet.close()

    def _drop_all(self) -> None:
        """Have no shards any more, nor anything to hand on."""
        for outlet in self._outlets.all:
            outlet.clear()
        for replica in self.replicas.values():
            replica.drop()
        self.replicas.clear()

    def _readable(self, epoch: int, clock: int, reads: Sequence[Read], until: float) -> dict[int, Replica]:
        """Wait until the clocks allow all of the reads; return the replicas that they are of."""
        while True:
            self._enter(epoch)
            tails = {
                shard: self._mine(shard, lambda place: place.tail, _NO_TAIL)
                for shard in dict.fromkeys(chain.from_iterable(read.shards for read in reads))
            }
            early = [
                (read.table, tails[shard].shard)
                for read in reads
                if self.job.tables[read.table].consistency.bound is not None
                for shard in read.shards
                if not tails[shard].shard.ready(read.table, clock)
            ]
            if not early:
                return tails
            left = 0.0 if self._hurried else until - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                raise NotYet(sorted({task for table, shard in early for task in shard.missing(table, clock)}))

    def _enter(self, epoch: int) -> None:
        """Refuse what is of another epoch; what is of a later one waits for it."""
        self._wait_for_view(epoch)
        if epoch != self.epoch:
            raise Refused(self.epoch, f"server {self.server} is in epoch {self.epoch}, not {epoch}")

    def _wait_for_view(self, epoch: int) -> None:
        self._viewed.wait_for(lambda: self.epoch >= epoch, _NEWER_VIEW_S)
        if not self._trusted():
            raise Unsure(self.epoch, f"server {self.server} was stopped, and does not know yet whether it was missed")

    def _mine(self, shard: int, allowed: Callable[[Place], bool], lack: str) -> Replica:
        replica = self.replicas.get(shard)
        if replica is None or not allowed(replica.place):
            raise Refused(self.epoch, f"in epoch {self.epoch} server {self.server} {lack} shard {shard}", (shard,))
        return replica

    def _apply(self, updates: Sequence[tuple[Replica, Entry, Update]]) -> list[Applied]:
        """Apply updates, write them down, and hand them on."""
        done = [replica.shard.apply(update) for replica, _, update in updates]
        new = [
            (replica, entry.kept(applied.position) if replica.hands_on else entry, applied)
            for (replica, entry, _), applied in zip(updates, done, strict=True)
            if not applied.repeated
        ]
        if new:
            self._write_down([_record(self.epoch, entry, applied) for _, entry, applied in new])
        for replica, entry, _ in new:
            if replica.hands_on:
                self._outlets.hand(replica, entry)
        return done

    def _write_down(self, records: Sequence[Record]) -> None:
        """Tell of updates that were applied; where that fails others take over, from what they have."""
        try:
            self._applied(records)
        except ExchangeError as error:
            self._drop_all()
            raise Broken(error) from error

    def _settle(self, replica: Replica, told: Told) -> bool:
        if not replica.settle():
            return False
        if replica.upstream is not None:
            told.upstream.append((replica.upstream, (replica.shard.number, replica.committed)))
        return True

    @contextmanager
    def _telling(self) -> Iterator[Told]:
        """Hold the lock and wake who waits for a change; once it is free, tell predecessors and the coordinator.

        What was pushed is answered after this too, so nobody hears of an update that is not kept.
        """
        told = Told()
        try:
            with self.lock:
                try:
                    yield told
                finally:
                    told.epoch = self.epoch
                    self._changed.notify_all()
        finally:
            try:
                self._settled()
            except ExchangeError as error:
                raise Broken(error) from error
            told.say(self._synced)


def _is_master(place: Place) -> bool:
    return place.head and place.turn is None


def _record(epoch: int, entry: Entry, applied: Applied) -> Record:
    return Record(epoch, entry.shard, applied.position, entry.worker, entry.sequence, applied.staleness, entry.tasks)
