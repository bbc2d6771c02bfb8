"""Sockets that clients open become connections: one by itself, or several once all of them are there."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field

from paceline.errors import ExchangeError
from paceline.exchange.wire.frame import Connection
from paceline.exchange.wire.opening import Opening
from paceline.exchange.wire.shared import SharedConnection
from paceline.exchange.wire.sockets import SocketConnection


@dataclass
class _Waiting:
    since: float
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
        raise ExchangeError("several streams are not offered here.")

    def close(self) -> None:
        """Give up connections that are not complete."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            _give_up(one)


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
