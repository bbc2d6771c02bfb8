"""What a server holds in the epoch of one view, and of what it may answer: under one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from paceline.exchange.server.place import Place
from paceline.exchange.server.replica import Replica
from paceline.exchange.server.requests import Refused, Unsure
from paceline.exchange.view import View

NEWER_VIEW_S: Final = 2.0
"""How long a request of a later epoch than this server's waits for its view."""


class Standing:
    """The replicas of a server, and the view that it goes by. All is for who has the lock, but for `epoch`.

    Args:
        server: this server's id.
        trusted: whether this process may take itself for a member: it was not stopped for long.

    Attributes:
        viewed: told of each new view.
        changed: told of whatever else changes too.
        closed: nothing is served any more.
    """

    def __init__(self, server: int, trusted: Callable[[], bool]) -> None:
        self.server: Final = server
        self.lock: Final = threading.Lock()
        self.viewed: Final = threading.Condition(self.lock)
        self.changed: Final = threading.Condition(self.lock)
        self.replicas: Final[dict[int, Replica]] = {}
        self.view = View()
        self.closed = False
        self._trusted = trusted

    @property
    def epoch(self) -> int:
        """Of the view."""
        return self.view.epoch

    def enter(self, epoch: int) -> None:
        """Let in what is of this epoch; what is of a later one waits for it.

        Raises:
            Refused: it is of another.
        """
        self.wait_for_view(epoch)
        if epoch != self.epoch:
            raise Refused(self.epoch, f"server {self.server} is in epoch {self.epoch}, not {epoch}")

    def wait_for_view(self, epoch: int) -> None:
        """Wait for the view of an epoch, which may be on its way, for some time.

        Raises:
            Unsure: this process may not take itself for a member.
        """
        self.viewed.wait_for(lambda: self.epoch >= epoch, NEWER_VIEW_S)
        if not self._trusted():
            raise Unsure(self.epoch, f"server {self.server} was stopped, and does not know yet whether it was missed")

    def master(self, shard: int) -> Replica:
        """Return a shard whose master this server is.

        Raises:
            Refused: it is not.
        """
        return self._mine(shard, _is_master, "is no master of")

    def tail(self, shard: int) -> Replica:
        """Return a shard for which this server answers reads.

        Raises:
            Refused: it does not.
        """
        return self._mine(shard, _is_tail, "does not answer for")

    def drop(self) -> None:
        """Have no shards any more."""
        for replica in self.replicas.values():
            replica.drop()
        self.replicas.clear()

    def _mine(self, shard: int, allowed: Callable[[Place], bool], lack: str) -> Replica:
        replica = self.replicas.get(shard)
        if replica is None or not allowed(replica.place):
            raise Refused(self.epoch, f"in epoch {self.epoch} server {self.server} {lack} shard {shard}", (shard,))
        return replica


def _is_master(place: Place) -> bool:
    return place.head and place.turn is None


def _is_tail(place: Place) -> bool:
    return place.tail
