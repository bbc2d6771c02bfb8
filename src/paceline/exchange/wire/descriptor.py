"""A socket that one thread may close while others use it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import ConnectionLost


class Shared:
    """A socket of several threads. Its number is not given back to the system while a thread is about to use it."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.settimeout(None)
        self._sock, self.name = sock, name
        self._lock = threading.Lock()
        self._users, self._closed = 0, False

    @contextmanager
    def used(self) -> Iterator[socket.socket]:
        """Use the socket; a failure of it, or of anything else meanwhile, ends the connection: half a frame is none.

        Raises:
            ConnectionLost: it is closed, or fails.
        """
        with self._lock:
            if self._closed:
                raise ConnectionLost(f"the connection to {self.name} is closed.")
            self._users += 1
        try:
            yield self._sock
        except OSError as error:
            self.close()
            raise ConnectionLost(f"lost {self.name}: {error.strerror or error}.") from error
        except BaseException:
            self.close()
            raise
        finally:
            with self._lock:
                self._users -= 1
                last = self._closed and not self._users
            if last:
                self._sock.close()

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
