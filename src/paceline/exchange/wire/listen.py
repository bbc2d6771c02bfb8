"""Servers listen, clients connect. Who does not know the job's secret is turned away, and holds up nobody."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import stat
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

from paceline.errors import ConnectionLost, ExchangeError, PacelineError
from paceline.exchange.view import Address
from paceline.exchange.wire.address import UNIX_PATH_BYTES, bound, machine, reachable
from paceline.exchange.wire.auth import TIMEOUT_S, authenticate
from paceline.exchange.wire.frame import Connection
from paceline.exchange.wire.gathering import Gathering
from paceline.exchange.wire.opening import Opening

_log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_STRANGERS: Final = 128
"""Most peers that are being made acquainted with; one more, and the one that takes longest is turned away."""


class Listener:
    """Where connections come in: a TCP port, and a Unix socket for processes of this host."""

    def __init__(
        self, bind: str, secret: bytes, *, unix: str | None = None, port: int = 0, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Begin to listen.

        Args:
            bind: address of the interface for TCP; empty: no TCP.
            secret: that clients must know.
            unix: path for the Unix socket; a longer one than the system takes is replaced by one in a directory for
                temporary files. None: no Unix socket.
            port: of TCP; 0: any that is free.
            timeout_s: within what a client must have introduced itself.

        Raises:
            ExchangeError: an address cannot be used.
        """
        self._secret, self._timeout_s = secret, timeout_s
        self._ready: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: deque[socket.socket] = deque()
        self._gathering = Gathering(timeout_s)
        self._closed = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._sockets: list[socket.socket] = []
        self._path = ""
        try:
            if bind:
                self._sockets.append(_tcp(bind, port))
            if unix is not None:
                path = self._short(unix)
                self._sockets.append(_unix(path))
                self._path = path
        except BaseException:
            self.close()
            raise
        found = self._sockets[0].getsockname()[1] if bind else 0
        self._address = Address(reachable(bind), found, self._path, machine())
        for sock in self._sockets:
            threading.Thread(target=self._listen, args=(sock,), name="listener", daemon=True).start()

    @property
    def address(self) -> Address:
        """Where clients connect to."""
        return self._address

    def accept(self) -> Connection:
        """Wait for a client that knows the secret.

        Raises:
            ConnectionLost: `close` was called.
        """
        connection = self._ready.get()
        if connection is None:
            self._ready.put(None)  # for others that wait
            raise ConnectionLost("this listener is closed.")
        return connection

    def close(self) -> None:
        """Listen no more; who waits in `accept` is woken. Connections that were accepted stay. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = [*self._pending]
        self._drain()
        for sock in (*self._sockets, *pending):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for sock in self._sockets:
            sock.close()
        self._gathering.close()
        if self._path:
            Path(self._path).unlink(missing_ok=True)
        if self._folder is not None:
            self._folder.cleanup()

    def _short(self, path: str) -> str:
        if len(os.fsencode(path)) <= UNIX_PATH_BYTES:
            return path
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
        return str(Path(self._folder.name) / "socket")

    def _listen(self, sock: socket.socket) -> None:
        while True:
            try:
                client, _ = sock.accept()
            except OSError as error:
                if self._closed:
                    return
                _log.warning("cannot accept a connection: %s; trying again", error.strerror)
                time.sleep(0.1)  # no descriptors are left, as a rule
                continue
            with self._lock:
                self._pending.append(client)
                oldest = self._pending[0] if len(self._pending) > _STRANGERS else None
            if oldest is not None:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._meet, args=(client,), name="acquaintance", daemon=True).start()

    def _meet(self, client: socket.socket) -> None:
        """Let a client in, or turn it away."""
        try:
            try:
                authenticate(client, self._secret, server=True, timeout_s=self._timeout_s)
                client.settimeout(self._timeout_s)
                connection = self._gathering.add(client, Opening.receive(client))
            finally:
                with self._lock:
                    self._pending.remove(client)
        except (PacelineError, OSError) as error:
            if not self._closed:
                _log.warning("a stranger was turned away: %s", error)
            client.close()
            return
        if connection is not None:
            self._ready.put(connection)
            if self._closed:
                self._drain()

    def _drain(self) -> None:
        """Close connections that nobody will accept any more, and wake who waits for one."""
        with contextlib.suppress(queue.Empty):
            while True:
                connection = self._ready.get_nowait()
                if connection is not None:
                    connection.close()
        self._ready.put(None)


def _tcp(bind: str, port: int) -> socket.socket:
    sock = bound(bind, port)
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ExchangeError(f"cannot listen on {bind} port {port}: {error.strerror or error}.") from error
    return sock


def _unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)  # of a process that was killed
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ExchangeError(f"cannot listen at {path}: {error.strerror or error}.") from error
    return sock
