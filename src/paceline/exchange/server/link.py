"""The way to a successor: what is put is sent in order, and sent again over a new connection where one breaks."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.messages import Kind
from paceline.exchange.server.copies import copy_of
from paceline.exchange.server.entry import Entry, forwarded
from paceline.exchange.server.keeper import Keeper
from paceline.exchange.server.requests import Broken
from paceline.exchange.view import Address
from paceline.exchange.wire.frame import Connection, Frame

_log = logging.getLogger(__name__)

_AGAIN_S: Final = 0.02
"""Between attempts to reach a successor that is not there; the next view tells whether it is gone."""

_STRANGE_S: Final = 1.0
"""The same, where somebody is there who is no server of this job."""

_BATCH_BYTES: Final = 16 << 20
_BATCH_ENTRIES: Final = 256
"""Most that one message has, so that acknowledgements come while more is under way."""

_PING_S: Final = 0.5
"""Between questions whether the successor is there."""

_SLOWEST_BYTES_PER_S: Final = 1 << 20
"""A successor that takes less of what it is sent counts as not reached."""


class Link:
    """An outlet with a thread that sends and one that receives; see `outlet.Outlet`.

    Args:
        keeper: whose lock guards the queue.
        server: the successor.
        address: where it listens.
        copying: whether for replicas in the making; copies take long, so they have a way of their own.
        connect: opens a connection.
        failed: told of an error that nobody expects.
    """

    def __init__(
        self,
        keeper: Keeper,
        server: int,
        address: Address,
        copying: bool,
        connect: Callable[[Address], Connection],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.server: Final = server
        self._keeper, self._address, self._copying = keeper, address, copying
        self._connect, self._failed = connect, failed
        self._queue: deque[Entry | int] = deque()
        self._wake = threading.Condition(keeper.lock)
        self._connection: Connection | None = None
        self._gone_bytes = (0, 0)  # sent and received over connections that ended
        self._broken = False
        self._asked: tuple[float, int] | None = None  # since when nothing was heard, and bytes that were sent since
        self._pinged_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"to server {server}", daemon=True)
        self._thread.start()

    def put(self, item: Entry | int) -> None:
        """See `outlet.Outlet`."""
        self._queue.append(item)
        self._wake.notify()

    def clear(self) -> None:
        """See `outlet.Outlet`."""
        self._queue.clear()

    def close(self) -> None:
        """See `outlet.Outlet`; without the lock."""
        self._closed.set()
        with self._keeper.lock:
            connection = self._connection
            self._wake.notify()
        if connection is not None:
            connection.close()

    def is_silent(self, patience_s: float) -> bool:
        """See `outlet.Outlet`."""
        asked = self._asked
        if asked is None:
            return False
        since_s, sent_bytes = asked
        return time.monotonic() - since_s > patience_s + sent_bytes / _SLOWEST_BYTES_PER_S

    @property
    def queued(self) -> int:
        """See `outlet.Outlet`."""
        return len(self._queue)

    @property
    def bytes(self) -> tuple[int, int]:
        """See `outlet.Outlet`."""
        sent, received = self._gone_bytes
        held = self._connection
        return (sent, received) if held is None else (sent + held.sent_bytes, received + held.received_bytes)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._asks(0)
                try:
                    connection = self._connect(self._address)
                except ConnectionLost:
                    self._closed.wait(_AGAIN_S)
                    continue
                except ExchangeError as error:  # somebody else may listen there by now; the next view tells
                    _log.warning("cannot reach server %d: %s", self.server, error)
                    self._closed.wait(_STRANGE_S)
                    continue
                self._serve(connection)
        except Exception as error:  # of a thread: told to whoever runs the server
            self._failed(error)

    def _serve(self, connection: Connection) -> None:
        """Send what is put until the connection ends."""
        receiver = threading.Thread(target=self._receive, args=(connection,), daemon=True)
        try:
            hello = json.dumps({"role": "server", "id": self._keeper.server, "opened": time.monotonic_ns()})
            connection.send(Frame(Kind.HELLO, text=hello))
            with self._keeper.lock:
                self._connection, self._broken = connection, False
                self._keeper.reconnected(self.server, self)
            receiver.start()
            self._pinged_s = 0.0
            while (frame := self._next()) is not None:
                self._asks(sum(tensor.nbytes for tensor in frame.tensors))
                connection.send(frame)
        except ConnectionLost:
            pass
        finally:
            connection.close()
            if receiver.ident is not None:
                receiver.join()
            with self._keeper.lock:
                self._gone_bytes, self._connection = self.bytes, None

    def _next(self) -> Frame | None:
        """Wait for what is to be sent; None: the connection is of no use any more."""
        keeper, ping_s = self._keeper, self._pinged_s + _PING_S
        with keeper.lock:
            self._wake.wait_for(
                lambda: self._queue or self._broken or self._closed.is_set(), max(0.0, ping_s - time.monotonic())
            )
            if self._broken or self._closed.is_set():
                return None
            if time.monotonic() >= ping_s or not self._queue:
                self._pinged_s = time.monotonic()
                return Frame(Kind.PING)
            first = self._queue[0]
            if isinstance(first, int):
                self._queue.popleft()
                replica = keeper.replicas[first]
                move = replica.place.outgoing
                assert move is not None
                replica.copy_taken()
                return copy_of(replica.shard, move, keeper.epoch)
            return self._batch(keeper.epoch)

    def _batch(self, epoch: int) -> Frame:
        entries: list[Entry] = []
        size = 0
        while self._queue and len(entries) < _BATCH_ENTRIES and size < _BATCH_BYTES:
            entry = self._queue[0]
            if isinstance(entry, int):
                break
            self._queue.popleft()
            entries.append(entry)
            size += entry.size_bytes
        frame = forwarded(entries, epoch)
        frame.kind = Kind.FORWARD
        return frame

    def _asks(self, sent_bytes: int) -> None:
        """Something is sent that is to be answered."""
        since_s, before_bytes = self._asked or (time.monotonic(), 0)
        self._asked = since_s, before_bytes + sent_bytes

    def _receive(self, connection: Connection) -> None:
        try:
            while True:
                frame = connection.receive()
                self._asked = None
                if frame.kind == Kind.PING:
                    continue
                numbers = frame.numbers.tolist()
                pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
                self._keeper.acknowledged(self.server, frame.epoch, pairs)
        except ConnectionLost:
            pass
        except Broken as broken:
            self._failed(broken.why)
        except Exception as error:  # of a thread: told to whoever runs the server
            self._failed(error)
        finally:
            with self._keeper.lock:
                self._broken = True
                self._wake.notify()
