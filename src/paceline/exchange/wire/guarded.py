"""A socket that one thread may close while others use it."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import NoReturn, Protocol

from paceline.errors import ConnectionLost


class Users(Protocol):
    """Who uses a socket: its number is not given back to the system meanwhile."""

    def enter(self) -> bool:
        """Return whether the socket may be used, until `leave`; not once it is ended."""
        ...

    def leave(self) -> bool:
        """Return whether the socket is to be closed now."""
        ...

    def end(self) -> tuple[bool, bool]:
        """Return whether this is the first time, and whether nobody uses the socket."""
        ...


class CountedUsers:
    """See `Users`; native code has the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._ended = 0, False

    def enter(self) -> bool:
        """See `Users`."""
        with self._lock:
            self._count += not self._ended
            return not self._ended

    def leave(self) -> bool:
        """See `Users`."""
        with self._lock:
            self._count -= 1
            return self._ended and not self._count

    def end(self) -> tuple[bool, bool]:
        """See `Users`."""
        with self._lock:
            first, self._ended = not self._ended, True
            return first, not self._count


class Guarded:
    """A socket of several threads.

    Attributes:
        sock: the socket; to be used by who has entered.
        name: of the peer, in errors.
        users: who has entered.
    """

    def __init__(self, sock: socket.socket, name: str, users: Users | None = None) -> None:
        sock.settimeout(None)
        self.sock, self.name = sock, name
        self.users: Users = users or CountedUsers()

    def __enter__(self) -> socket.socket:
        """Use the socket; a failure of it, or of anything else meanwhile, ends the connection: half a frame is none.

        Raises:
            ConnectionLost: it is closed, or fails while it is used.
        """
        if not self.users.enter():
            raise ConnectionLost(f"the connection to {self.name} is closed.")
        return self.sock

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.close()
        if self.users.leave():
            self.sock.close()
        if isinstance(error, OSError):
            raise self._lost(error) from error

    def failed(self, error: BaseException) -> NoReturn:
        """End the connection as its use has failed, and say so.

        Raises:
            ConnectionLost: the socket failed.
            BaseException: the error, if it is another.
        """
        self.close()
        if isinstance(error, OSError):
            raise self._lost(error) from error
        raise error

    def close(self) -> None:
        """End the connection, and wake who waits for the peer."""
        first, idle = self.users.end()
        if not first:
            return
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        if idle:
            self.sock.close()

    def _lost(self, error: OSError) -> ConnectionLost:
        return ConnectionLost(f"lost {self.name}: {error.strerror or error}.")
