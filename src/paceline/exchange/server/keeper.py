"""All replicas of a server under one lock: what is pushed, handed on and acknowledged, in the epoch of one view.

The lock is held while updates are applied, logged and put into outboxes, so that they leave in the order in which they
were applied, and while reads are taken, so that they are of one position. Nothing is sent under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from paceline.errors import ExchangeError
from paceline.exchange.job import Job
from paceline.exchange.server.answering import Answering
from paceline.exchange.server.applying import Applying, Observer
from paceline.exchange.server.entry import Entry
from paceline.exchange.server.outlet import Outlet
from paceline.exchange.server.outlets import Outlets
from paceline.exchange.server.place import places
from paceline.exchange.server.replica import Replica, Upstream, Waiting, check_newest
from paceline.exchange.server.requests import Broken, Refused
from paceline.exchange.server.standing import Standing
from paceline.exchange.server.told import Told
from paceline.exchange.shard.shard import Shard
from paceline.exchange.shard.together import RowPush
from paceline.exchange.updates import Update
from paceline.exchange.view import Address, Move, Turn, View

_T = TypeVar("_T")


class Keeper:
    """The shards of a server.

    Args:
        job: what is kept.
        server: this server's id.
        outlet: makes a way to a successor; its last argument tells whether for copies.
        synced: told of a move from here once its target has all, and of a turn of a head here once its successors
            have all; maybe more than once.
        trusted: whether this process may take itself for a member: it was not stopped for long.
        applied: see `applying.Observer`.
        settled: returns once what `applied` was told is kept; called before anybody else is told.

    Attributes:
        job: what is kept.
        server: this server's id.
        lock: of all that is here.
        replicas: by shard; under the lock.
        answering: answers reads.
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
        self._standing = Standing(server, trusted)
        self.lock: Final = self._standing.lock
        self.replicas: Final = self._standing.replicas
        self.answering: Final = Answering(job, self._standing)
        self._outlets = Outlets(lambda server, address, copying: outlet(self, server, address, copying))
        self._applying = Applying(self._standing, self._outlets, applied)
        self._synced, self._settled = synced, settled

    @property
    def view(self) -> View:
        """The one that this server goes by."""
        return self._standing.view

    @property
    def epoch(self) -> int:
        """Of the view that this server goes by."""
        return self._standing.epoch

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
            self._standing.enter(epoch)
            replicas = [self._standing.master(entry.shard) for entry in entries]
            for replica, update in zip(replicas, updates, strict=True):
                replica.shard.check(update)
            done = self._applying.apply([*zip(replicas, entries, updates, strict=True)])
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
            self._standing.enter(epoch)
            replicas = [self._standing.master(shard) for shard in push.reads]
            if not entries and any([replica.place.successor is not None for replica in replicas]):
                return False
            done = self._applying.apply_rows(replicas, push, entries)
            if done is None:
                return False
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
            self._standing.enter(epoch)
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
            for (_, entry, _), applied in zip(fresh, self._applying.apply(fresh), strict=True):
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
            self._standing.wait_for_view(epoch)
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

    def hurry(self, there: bool) -> None:
        """Let no read wait for its clocks, or let them again.

        Args:
            there: whether tasks wait for somebody to do them: whoever waits for those here may have to be the one.
        """
        with self.lock:
            self.answering.hurried = there
            self._standing.changed.notify_all()

    def captured(self, shard: int, clock: int, epoch: int, capture: Callable[[Shard], _T]) -> _T | None:
        """Return what `capture` makes of a shard that has all tasks of clocks below `clock`, between two updates.

        None where this server, which answers for the shard in an epoch, does not do so any more. The view of that epoch
        may still be on its way.
        """
        with self.lock:
            self._standing.changed.wait_for(lambda: self.epoch >= epoch or self._standing.closed)
            while True:
                replica = self.replicas.get(shard)
                if replica is None or not replica.place.tail:
                    return None
                if replica.shard.completed >= clock:
                    return capture(replica.shard)
                self._standing.changed.wait()

    def adopt(self, view: View, loaded: Mapping[int, Shard]) -> None:
        """Go by a new view. loaded: the shards that this server is to hold from the start."""
        with self._telling() as told:
            if view.epoch <= self.epoch or self._standing.closed:
                return
            self._standing.view = view
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
            self._standing.viewed.notify_all()
        for outlet in unneeded:
            outlet.close()

    def close(self) -> None:
        """Serve no more."""
        with self.lock:
            self._standing.closed = True
            self._outlets.clear()
            self._standing.drop()
            outlets = self._outlets.taken()
            self._standing.changed.notify_all()
        for outlet in outlets:
            outlet.close()

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
                    self._standing.changed.notify_all()
        finally:
            try:
                self._settled()
            except ExchangeError as error:
                raise Broken(error) from error
            told.say(self._synced)
