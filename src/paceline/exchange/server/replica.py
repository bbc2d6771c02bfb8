"""A shard on one server, in its place in the chain: what its successor has not acknowledged, and what is committed.

Chain replication (van Renesse and Schneider, 2004). An update is committed once it is on all servers of the chain; who
pushed it hears so then. What the successor has not acknowledged stays in the outbox, so that whoever becomes the
successor gets it again, in order. Knows no sockets and no threads.

A replica in the making is handed updates too, but nobody waits for it before it has its copy. From then on commits wait
for it as for a successor, and once it has all that was committed without it, it may become one (`synced`).
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from paceline.errors import ConnectionLost
from paceline.exchange.server.entry import Entry
from paceline.exchange.server.place import Place
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Applied


class Waiting(Protocol):
    """Who is to hear that an update is on all replicas."""

    def committed(self, shard: int, applied: Applied) -> None:
        """It is, and this is what became of it at the master."""
        ...

    def refused(self, why: str) -> None:
        """This server cannot say any more."""
        ...


class Upstream(Protocol):
    """A connection of the predecessor, which hears what is committed."""

    @property
    def opened(self) -> int:
        """When the predecessor opened it, by its own clock; of two connections of one server the later one counts."""
        ...

    def commit(self, epoch: int, pairs: list[tuple[int, int]]) -> None:
        """Tell it up to which position each shard is on this server and all after it, as of an epoch."""
        ...


def check_newest(upstream: Upstream, known: Upstream | None) -> None:
    """Check that what came by a connection is not what the same server has sent again by a later one that is known.

    Raises:
        ConnectionLost: it is; it has waited somewhere on this server.
    """
    if known is not None and upstream.opened < known.opened:
        raise ConnectionLost("its sender has opened another connection since.")


class Replica:
    """A shard in its place.

    Args:
        shard: what is kept; position and content change by the owner's hand.
        place: where in the chain.
        copied_by: by what it was copied here.
    """

    def __init__(self, shard: Shard, place: Place, copied_by: Upstream | None = None) -> None:
        self.shard = shard
        self.place = place
        self.copied_by: Final = copied_by
        self.outbox: deque[Entry] = deque()
        # What it begins with is on all after it: they have it from the same snapshot, or there is nobody.
        self.committed = shard.position
        self._acknowledged = shard.position  # by the successor
        self._waiting: deque[tuple[Applied, Waiting]] = deque()
        self._copied = False  # the replica in the making was sent a copy
        self._waits = False  # commits wait for the successor
        self._goal: int | None = None  # position from which on a replica in the making is as good as any
        self.take(place)
        self.upstream = copied_by

    def take(self, place: Place) -> None:
        """Take the place of a new view."""
        before, self.place = self.place, place
        self.upstream = None
        if place.successor is None:
            self.outbox.clear()
            self._waits = False
        elif place.outgoing is None:
            self._waits = True
        elif place.outgoing != before.outgoing:
            self.restart_copy()
        if place.outgoing is None:
            self._copied, self._goal = False, None

    def restart_copy(self) -> None:
        """The replica in the making has nothing, or lost it: it needs a copy."""
        self.outbox.clear()
        self._copied, self._waits, self._goal = False, False, None
        self._acknowledged = 0

    @property
    def needs_copy(self) -> bool:
        """Whether a replica in the making is still to be sent its copy."""
        return self.place.outgoing is not None and not self._copied

    def copy_taken(self) -> None:
        """The state was taken for the replica in the making: what comes from now on is handed to it."""
        self._copied = True

    @property
    def copy_in_flight(self) -> bool:
        """Whether a copy was sent and has not been acknowledged."""
        return self.place.outgoing is not None and self._copied and not self._waits

    @property
    def synced(self) -> bool:
        """Whether a replica in the making has all that this one has committed."""
        return self.place.outgoing is not None and self._waits and self._goal is None

    @property
    def drained(self) -> bool:
        """Whether this server is to hand the shard's mastery on, and all that it has is on the others."""
        return self.place.turn is not None and self.committed == self.shard.position

    @property
    def hands_on(self) -> bool:
        """Whether updates go to a successor."""
        return self.place.successor is not None and not self.needs_copy

    def acknowledge(self, position: int) -> None:
        """The successor has all updates up to a position, and so have all after it."""
        if self.needs_copy:
            return
        self._acknowledged = max(self._acknowledged, position)
        while self.outbox and self.outbox[0].position <= position:
            self.outbox.popleft()
        if self.copy_in_flight:
            self._waits, self._goal = True, self.shard.position
        if self._goal is not None and self._acknowledged >= self._goal:
            self._goal = None

    def wait(self, applied: Applied, waiting: Waiting) -> None:
        """Have somebody told once an update is committed."""
        if applied.position <= self.committed:
            waiting.committed(self.shard.number, applied)
        else:
            self._waiting.append((applied, waiting))

    def settle(self) -> bool:
        """Commit what can be, tell those who wait, and return whether anything was committed."""
        reached = self._acknowledged if self._waits else self.shard.position
        if reached <= self.committed:
            return False
        self.committed = reached
        while self._waiting and self._waiting[0][0].position <= reached:
            applied, waiting = self._waiting.popleft()
            waiting.committed(self.shard.number, applied)
        return True

    def drop(self) -> None:
        """It is not kept here any more."""
        for _, waiting in self._waiting:
            waiting.refused(f"shard {self.shard.number} has left this server")
        self._waiting.clear()
        self.outbox.clear()
