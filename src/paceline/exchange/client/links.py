"""Connections of one thread of a worker to servers, and who waits for which answer on them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor

from paceline.errors import ConnectionLost
from paceline.exchange.messages import Kind
from paceline.exchange.view import Address, View
from paceline.exchange.wire.frame import Connection, Frame, Meta

Connect: TypeAlias = Callable[[Address], Connection]


class Asker(Protocol):
    """Who waits for an answer; requests are named by their numbers."""

    def place(self, request: int, answer: Frame, metas: Sequence[Meta]) -> Sequence[Tensor] | None:
        """Return where the answer's tensors go; see `frame.Placing`."""
        ...

    def answered(self, request: int, answer: Frame) -> None:
        """Take the answer; its tensors are valid only now."""
        ...

    def lost(self, request: int) -> None:
        """There will be no answer: the server is gone, or the way to it."""
        ...


@dataclass
class _Link:
    connection: Connection
    waiting: dict[int, Asker] = field(default_factory=dict)

    def place(self, answer: Frame, metas: Sequence[Meta]) -> Sequence[Tensor] | None:
        asker = self.waiting.get(answer.request)
        return None if asker is None else asker.place(answer.request, answer, metas)


class Links:
    """One connection for each server, made when it is first needed.

    Args:
        worker: who connects.
        connect: reaches an address, or raises ConnectionLost.
        view: tells the newest view.
    """

    def __init__(self, worker: int, connect: Connect, view: Callable[[], View]) -> None:
        self._worker, self._connect, self._view = worker, connect, view
        self._links: dict[int, _Link] = {}
        self._lock = threading.Lock()  # of _links: `keep` is called by other threads
        self._request = 0
        self._closed = False
        self._sent_bytes = self._received_bytes = 0  # of connections that are gone

    def ask(self, server: int, frame: Frame, asker: Asker) -> int:
        """Send a request and return its number; if that fails, the asker hears of it as of any loss, at once.

        Raises:
            ConnectionLost: there is no way to this server; the asker is not told.
        """
        link = self._links.get(server) or self._reach(server)
        self._request += 1
        frame.request = self._request
        try:
            link.connection.send(frame)
        except ConnectionLost:
            self._drop(server)
            raise
        link.waiting[frame.request] = asker
        return frame.request

    def receive(self, server: int) -> None:
        """Wait for one answer of a server and hand it over; if it is gone, all who wait for it hear of that."""
        link = self._links[server]
        try:
            answer = link.connection.receive(link.place)
        except ConnectionLost:
            self._drop(server)
            return
        asker = link.waiting.pop(answer.request, None)
        if asker is not None:
            asker.answered(answer.request, answer)

    def keep(self, servers: Collection[int]) -> None:
        """Close connections to all others, so that nobody waits for them. From any thread."""
        with self._lock:
            gone = [link for server, link in self._links.items() if server not in servers]
        for link in gone:
            link.connection.close()

    def close(self) -> None:
        """Close all connections, also those that are being made. From any thread."""
        self._closed = True
        self.keep(())

    @property
    def sent_bytes(self) -> int:
        """Bytes sent so far."""
        with self._lock:
            return self._sent_bytes + sum(link.connection.sent_bytes for link in self._links.values())

    @property
    def received_bytes(self) -> int:
        """Bytes received so far."""
        with self._lock:
            return self._received_bytes + sum(link.connection.received_bytes for link in self._links.values())

    def _reach(self, server: int) -> _Link:
        address = self._view().servers.get(server)
        if address is None:
            raise ConnectionLost(f"server {server} has left.")
        connection = self._connect(address)
        try:
            connection.send(Frame(Kind.HELLO, text=json.dumps({"role": "worker", "id": self._worker})))
        except ConnectionLost:
            connection.close()
            raise
        link = _Link(connection)
        with self._lock:
            self._links[server] = link
        if self._closed or server not in self._view().servers:  # `keep` may have been called before it saw this one
            connection.close()
        return link

    def _drop(self, server: int) -> None:
        with self._lock:
            link = self._links.pop(server)
            self._sent_bytes += link.connection.sent_bytes
            self._received_bytes += link.connection.received_bytes
        link.connection.close()
        for request, asker in link.waiting.items():
            asker.lost(request)
