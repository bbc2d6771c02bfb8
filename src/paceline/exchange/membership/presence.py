"""What the coordinator knows of a member while it is there, and may forget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.exchange.membership.protocol import Message
from paceline.exchange.membership.seats import Seat


class Peer(Protocol):
    """A connection. What is sent goes out once it is in the store."""

    def send(self, message: Message) -> None:
        """Send."""
        ...

    def close(self) -> None:
        """End the connection once all is sent."""
        ...


@dataclass
class Presence:
    """What is known of a member while it is there, and may be forgotten.

    Attributes:
        heard_s: when it was last heard.
        peer: its connection, if it has one.
        until_s: by when it must be heard, after its connection ended.
        figures: what it last said of itself.
        asking: number of its question for work, if that waits for an answer, and since when.
        leaving: number of its question to leave.
    """

    heard_s: float
    peer: Peer | None = None
    until_s: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    asking: tuple[int, float] | None = None
    leaving: int | None = None

    def described(self, seat: Seat, now_s: float) -> dict[str, Any]:
        """Return what people want to know of a member."""
        return {
            "id": seat.id,
            "role": seat.role.value,
            "pid": seat.process.pid,
            "machine": seat.address.machine,
            "leaving": seat.leaving,
            "connected": self.peer is not None,
            "silent_s": round(now_s - self.heard_s, 3),
            "figures": self.figures,
        }


@dataclass(frozen=True)
class Departed:
    """A member that left in good order.

    Attributes:
        seat: its own.
        at_s: when it left.
        figures: what it said last of itself.
    """

    seat: Seat
    at_s: float
    figures: Mapping[str, Any]

    def described(self) -> dict[str, Any]:
        """Return what people want to know of it."""
        return {"id": self.seat.id, "role": self.seat.role.value, "figures": self.figures}
