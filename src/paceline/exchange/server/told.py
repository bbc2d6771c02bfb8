"""What a server has to say of its replicas once its lock is free: nothing is sent under it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.exchange.server.replica import Replica, Upstream
from paceline.exchange.view import Move, Turn


@dataclass
class Told:
    """What is to be said: to predecessors what is committed, to the coordinator which replicas have all.

    epoch: in which all this is so.
    """

    epoch: int = 0
    upstream: list[tuple[Upstream, tuple[int, int]]] = field(default_factory=list)
    synced: list[Move | Turn] = field(default_factory=list)

    def turned(self, replica: Replica) -> None:
        """Note that a head may become the tail, where its successors have all that it has."""
        if replica.drained and replica.place.turn is not None:
            self.synced.append(replica.place.turn)

    def say(self, synced: Callable[[Move | Turn], None]) -> None:
        """Say all of it; synced: tells the coordinator."""
        by_upstream: dict[Upstream, list[tuple[int, int]]] = {}
        for upstream, pair in self.upstream:
            by_upstream.setdefault(upstream, []).append(pair)
        for upstream, pairs in by_upstream.items():
            upstream.commit(self.epoch, pairs)
        for one in self.synced:
            synced(one)
