"""The ways from a server to all its successors. Under the keeper's lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.exchange.server.entry import Entry
from paceline.exchange.server.outlet import Outlet
from paceline.exchange.server.replica import Replica
from paceline.exchange.view import Address, View


class Outlets:
    """An outlet for each successor, and another for each that is sent copies.

    Args:
        make: makes one, given the successor, where it listens, and whether for copies.
    """

    def __init__(self, make: Callable[[int, Address, bool], Outlet]) -> None:
        self._make = make
        self._held: dict[tuple[int, bool], Outlet] = {}

    @property
    def all(self) -> list[Outlet]:
        """All that there are."""
        return list(self._held.values())

    def clear(self) -> None:
        """Have nothing to send any more."""
        for outlet in self._held.values():
            outlet.clear()

    def taken(self) -> list[Outlet]:
        """Return all that there are, and have none any more."""
        held, self._held = self.all, {}
        return held

    def hand(self, replica: Replica, entry: Entry) -> None:
        """Send an update to the successor of a replica that hands on, until it is acknowledged."""
        outlet = self._of(replica)
        assert outlet is not None
        replica.outbox.append(entry)
        outlet.put(entry)

    def renew(self, view: View, replicas: Mapping[int, Replica]) -> list[Outlet]:
        """Have outlets to all successors, filled with what they have not acknowledged; return those not needed now."""
        needed = {
            (replica.place.successor, replica.place.outgoing is not None)
            for replica in replicas.values()
            if replica.place.successor is not None
        }
        unneeded = [self._held.pop(key) for key in list(self._held) if key not in needed]
        for outlet in unneeded:  # nothing of the view before may be sent as of this one
            outlet.clear()
        for server, copying in sorted(needed - self._held.keys()):
            self._held[server, copying] = self._make(server, view.servers[server], copying)
        for outlet in self._held.values():
            self._refill(outlet, replicas)
        return unneeded

    def reconnected(self, outlet: Outlet, replicas: Mapping[int, Replica]) -> None:
        """The way to a successor is open, maybe again: send all that it may not have got."""
        for replica in replicas.values():
            if self._of(replica) is outlet and replica.copy_in_flight:
                replica.restart_copy()
        self._refill(outlet, replicas)

    def _refill(self, outlet: Outlet, replicas: Mapping[int, Replica]) -> None:
        """Put into an outlet all that its successor has not acknowledged, from the start."""
        outlet.clear()
        for shard, replica in sorted(replicas.items()):
            if self._of(replica) is not outlet:
                continue
            if replica.needs_copy:
                outlet.put(shard)
            for entry in replica.outbox:
                outlet.put(entry)

    def _of(self, replica: Replica) -> Outlet | None:
        place = replica.place
        return None if place.successor is None else self._held.get((place.successor, place.outgoing is not None))
