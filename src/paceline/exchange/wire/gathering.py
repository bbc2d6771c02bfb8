"""Sockets that clients open become connections: one by itself, or several once all of them are there."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field

from paceline.errors import ExchangeError
from paceline.exchange.wire.frame import Connection
from paceline.exchange.wire.opening import Opening
from paceline.exchange.wire.shared import SharedConnection
from paceline.exchange.wire.sockets import SocketConnection
from paceline.exchange.wire.striped import StripedConnection


@dataclass
class _Waiting:
    since: float
    streams: int
    sockets: dict[int, socket.socket] = field(default_factory=dict)


class Gathering:
    """The server's side."""

    def __init__(self, patience_s: float) -> None:
        """patience_s: how long some sockets of a connection wait for the others."""
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._waiting: dict[bytes, _Waiting] = {}

    def add(self, sock: socket.socket, opening: Opening) -> Connection | None:
        """Return the connection that a socket completes, or None; the socket belongs to this object then.

        Raises:
            ExchangeError: the socket fits nothing.
        """
        if opening.shared:
            return _shared(sock)
        if opening.streams == 1:
            return SocketConnection(sock, "a client")
        complete = self._joined(sock, opening)
        return StripedConnection(complete, "a client") if complete else None

    def close(self) -> None:
        """Give up connections that are not complete."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            _give_up(one)

    def _joined(self, sock: socket.socket, opening: Opening) -> list[socket.socket]:
        """Return the sockets of a connection in order, once all are there."""
        now = time.monotonic()
        with self._lock:
            late = [name for name, one in self._waiting.items() if one.since < now - self._patience_s]
            given_up = [self._waiting.pop(name) for name in late]
            waiting = self._waiting.setdefault(opening.connection, _Waiting(now, opening.streams))
            fits = waiting.streams == opening.streams and opening.stream not in waiting.sockets
            if fits:
                waiting.sockets[opening.stream] = sock
            complete = len(waiting.sockets) == waiting.streams
            if complete:
                del self._waiting[opening.connection]
        for one in given_up:
            _give_up(one)
        if not fits:
            raise ExchangeError(f"a client's stream {opening.stream} of {opening.streams} does not fit the others.")
        return [waiting.sockets[stream] for stream in range(waiting.streams)] if complete else []


def _shared(sock: socket.socket) -> Connection:
    """Return a connection through shared memory: the client sends a socket for turns."""
    _, files, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not files:
        raise ExchangeError("a client asks for shared memory, and sends no socket for turns.")
    return SharedConnection(sock, socket.socket(fileno=files[0]), "a client")


def _give_up(waiting: _Waiting) -> None:
    for sock in waiting.sockets.values():
        with contextlib.suppress(OSError):
            sock.close()
