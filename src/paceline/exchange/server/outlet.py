"""The way to a successor, as a keeper sees it."""

from __future__ import annotations

from typing import Protocol

from paceline.exchange.server.entry import Entry


class Outlet(Protocol):
    """Sends what is put, in order. Called under the keeper's lock, but for `close`."""

    def put(self, item: Entry | int) -> None:
        """Send an entry, or the copy of a shard (its number), after all that was put before."""
        ...

    def clear(self) -> None:
        """Forget what has not been sent."""
        ...

    def close(self) -> None:
        """Send no more, and free whoever is sending."""
        ...

    @property
    def server(self) -> int:
        """The successor."""
        ...

    def is_silent(self, patience_s: float) -> bool:
        """Whether the successor should have been heard from, or reached, by now."""
        ...

    @property
    def queued(self) -> int:
        """Entries and copies that were not sent yet."""
        ...

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes sent and received."""
        ...
