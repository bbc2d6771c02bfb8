"""A socket that one thread may close while others use it."""

from __future__ import annotations

import contextlib
import socket
import threading

from paceline.errors import ConnectionLost


class Guarded:
    """A socket of several threads. Its number is not given back to the system while a thread is about to use it."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.settimeout(None)
        self._sock, self.name = sock, name
        self._lock = threading.Lock()
        self._users, self._closed = 0, False

    def __enter__(self) -> socket.socket:
        """Use the socket; a failure of it, or of anything else meanwhile, ends the connection: half a frame is none.

        Raises:
            ConnectionLost: it is closed, or fails while it is used.
        """
        with self._lock:
            if self._closed:
                raise ConnectionLost(f"the connection to {self.name} is closed.")
            self._users += 1
        return self._sock

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.close()
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._sock.close()
        if isinstance(error, OSError):
            raise ConnectionLost(f"lost {self.name}: {error.strerror or error}.") from error

    def close(self) -> None:
        """End the connection, and wake who waits for the peer."""
        with self._lock:
            already, self._closed = self._closed, True
            idle = not self._users
        if already:
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if idle:
            self._sock.close()
