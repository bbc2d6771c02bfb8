"""Frames over several TCP connections at once, for networks that are faster than one of them.

The first carries heads, and frames that are small. The tensors' bytes of a large frame are divided evenly: each
connection carries a part, by a thread of its own at either end.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Final

from paceline.errors import ConnectionLost
from paceline.exchange.wire.guarded import Guarded
from paceline.exchange.wire.sockets import SocketConnection, receive_all, send_all, tune

_LEAST_BYTES: Final = 256 << 10
"""Of tensors, for which all connections are used."""


def divided(views: Sequence[memoryview], parts: int) -> list[list[memoryview]]:
    """Return pieces of memory as parts that are equal to within a byte, in order."""
    total = sum(map(len, views))
    divided: list[list[memoryview]] = [[] for _ in range(parts)]
    part, at = 0, 0
    for view in views:
        while len(view):
            room = total * (part + 1) // parts - at
            if not room:
                part += 1
                continue
            piece, view = view[:room], view[room:]
            divided[part].append(piece)
            at += len(piece)
    return divided


class StripedConnection(SocketConnection):
    """Frames over several sockets to one peer; see `frame.Connection`."""

    _ahead = False
    _most_bytes = _LEAST_BYTES - 1

    def __init__(self, socks: Sequence[socket.socket], name: str = "a peer") -> None:
        """Take connected sockets, in the same order at both ends."""
        super().__init__(socks[0], name)
        for sock in socks[1:]:
            tune(sock)
        others = [Guarded(sock, name) for sock in socks[1:]]
        self._others = others
        self._senders = [_Helper(other, send_all, self.close) for other in others]
        self._receivers = [_Helper(other, receive_all, self.close) for other in others]

    def close(self) -> None:
        """End the connection; see `frame.Connection`."""
        super().close()
        for other in self._others:
            other.close()
        for helper in (*self._senders, *self._receivers):
            helper.end()

    def _send(self, sock: socket.socket, first: bytes, views: list[memoryview]) -> None:
        if sum(map(len, views)) <= self._most_bytes:
            return super()._send(sock, first, views)
        ours, *parts = divided(views, 1 + len(self._others))
        with _helped(self._senders, parts, self.close):
            super()._send(sock, first, ours)

    def _fill(self, sock: socket.socket, pieces: list[memoryview]) -> None:
        if sum(map(len, pieces)) <= self._most_bytes:
            return super()._fill(sock, pieces)
        ours, *parts = divided(pieces, 1 + len(self._others))
        with _helped(self._receivers, parts, self.close):
            super()._fill(sock, ours)


class _Helper:
    """A thread that sends, or receives, parts of frames over one socket."""

    def __init__(
        self, shared: Guarded, work: Callable[[socket.socket, list[memoryview]], None], failed: Callable[[], None]
    ) -> None:
        self._shared, self._work, self._failed = shared, work, failed
        self._jobs: queue.SimpleQueue[tuple[list[memoryview], Future[None]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = False

    def begin(self, pieces: list[memoryview]) -> Future[None]:
        """Have some memory sent or filled."""
        done: Future[None] = Future()
        with self._lock:
            if self._ended:
                done.set_exception(ConnectionLost(f"the connection to {self._shared.name} is closed."))
                return done
            self._jobs.put((pieces, done))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stripe", daemon=True)
                self._thread.start()
        return done

    def end(self) -> None:
        """Let the thread end, after what it was given."""
        with self._lock:
            self._ended = True
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            pieces, done = job
            try:
                with self._shared as sock:
                    self._work(sock, pieces)
            except BaseException as error:
                self._failed()  # wakes who carries another part
                done.set_exception(error)
            else:
                done.set_result(None)
            del job, pieces, done  # what was sent is not held until the next frame


@contextmanager
def _helped(
    helpers: Sequence[_Helper], parts: Sequence[list[memoryview]], failed: Callable[[], None]
) -> Iterator[None]:
    """Have helpers carry their parts meanwhile; all are done in the end, whatever happened."""
    begun = [helper.begin(part) for helper, part in zip(helpers, parts, strict=True)]
    try:
        yield
    except BaseException:
        failed()
        raise
    finally:
        wait(begun)
    for one in begun:
        one.result()
