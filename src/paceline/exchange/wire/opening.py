"""What a client says of a connection once both ends know each other, before the first frame."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

from paceline.errors import ConnectionLost, ExchangeError, nearest

_OPENING: Final = struct.Struct("<4sBBBx16s")
_MAGIC: Final = b"PLO1"
MAX_STREAMS: Final = 64


class Transport(Enum):
    """How frames get to the peer."""

    AUTO = "auto"
    SHARED = "shared"
    UNIX = "unix"
    TCP = "tcp"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the name of a transport.

        Raises:
            ExchangeError: there is none of this name.
        """
        known = [transport.value for transport in cls]
        if text not in known:
            raise ExchangeError(f"there is no transport '{text}'; known: {', '.join(known)}.{nearest(text, known)}")
        return cls(text)


@dataclass(frozen=True)
class Opening:
    """One socket of a connection.

    Attributes:
        shared: tensors go through memory that both map.
        stream, streams: number of this socket among those of the connection.
        connection: what sockets of one connection have in common, 16 bytes.
    """

    shared: bool = False
    stream: int = 0
    streams: int = 1
    connection: bytes = bytes(16)

    def send(self, sock: socket.socket) -> None:
        """Say it to the server."""
        sock.sendall(_OPENING.pack(_MAGIC, self.shared, self.stream, self.streams, self.connection))

    @classmethod
    def receive(cls, sock: socket.socket) -> Self:
        """Hear what a client says.

        Raises:
            ConnectionLost: it went away.
            ExchangeError: it makes no sense.
        """
        data = b""
        while len(data) < _OPENING.size:
            more = sock.recv(_OPENING.size - len(data))
            if not more:
                raise ConnectionLost("a client went away before it said what it wants.")
            data += more
        magic, shared, stream, streams, connection = _OPENING.unpack(data)
        if magic != _MAGIC or shared > 1 or not stream < streams <= MAX_STREAMS:
            raise ExchangeError(f"a client asks for what there is not: {data!r}; is its version of Paceline another?")
        return cls(bool(shared), stream, streams, connection)
