"""Connections between two threads of a test, by each transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.exchange.view import Address
from paceline.exchange.wire.connect import connect
from paceline.exchange.wire.frame import Connection
from paceline.exchange.wire.listen import Listener

SECRET = b"of these tests"
TRANSPORTS = ("tcp", "unix", "shared", "tcp*3")
"""Names for `way`; `tcp*3`: over three connections."""


def reach(address: Address, way: str, timeout_s: float = 10) -> Connection:
    """Connect by one of `TRANSPORTS`."""
    transport, _, streams = way.partition("*")
    return connect(address, SECRET, transport=transport, streams=int(streams or 1), timeout_s=timeout_s)


@contextmanager
def pair(way: str, folder: Path) -> Iterator[tuple[Connection, Connection]]:
    """Return both ends of a connection, the client's first."""
    listener = Listener("127.0.0.1", SECRET, unix=str(folder / "socket"))
    try:
        client = reach(listener.address, way)
        server = listener.accept()
    finally:
        listener.close()
    try:
        yield client, server
    finally:
        client.close()
        server.close()


@contextmanager
def echo(server: Connection) -> Iterator[threading.Thread]:
    """Send back what arrives, in a thread, until the connection ends."""

    def run() -> None:
        while True:
            try:
                server.send(server.receive())
            except Exception:
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        server.close()
        thread.join(10)
        assert not thread.is_alive()
