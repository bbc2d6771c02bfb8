"""The coordinator's process: one loop around its sockets and its members' processes.

In each turn it hears all that has arrived, lets the coordinator decide, has that written down, and only then sends.
Strangers are dealt with in threads of their own, so that a silent one delays nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.membership.books import Books
from paceline.exchange.membership.coordinator import Coordinator
from paceline.exchange.membership.protocol import Incoming, Message, packed
from paceline.exchange.membership.seats import Process
from paceline.exchange.membership.stores import opened
from paceline.exchange.terms import Charter
from paceline.exchange.view import Address
from paceline.exchange.wire.address import UNIX_PATH_BYTES, bound
from paceline.exchange.wire.auth import authenticate

_LOG: Final = logging.getLogger(__name__)

_TURN_S: Final = 0.02
"""Longest turn: how late a lease is judged."""

_AWAY: Final = 0.25
"""Part of a lease: half a turn that took longer means that this process was away, and heard nobody meanwhile."""

_STRANGERS: Final = 256
"""Connections that may be introducing themselves at once."""

_UNSENT_BYTES: Final = 256 << 20
"""What may wait for a member that reads nothing (one that is stopped) before its connection is closed."""


class _Peer:
    """A connection, with what it is still to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.incoming = Incoming()
        self.unsent = bytearray()
        self.closing = False

    def send(self, message: Message) -> None:
        self.unsent += packed(message)

    def close(self) -> None:
        self.closing = True


class Service:
    """Serves a job's members until it is told to stop.

    Args:
        charter: of the job.
        directory: of the job.
        secret: of the job.
        anew: see `Books`.
    """

    def __init__(self, charter: Charter, directory: Directory, secret: bytes, *, anew: bool = False) -> None:
        self._charter, self._secret = charter, secret
        self._selector = selectors.DefaultSelector()
        self._stop = threading.Event()
        self._known: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._peers: dict[socket.socket, _Peer] = {}
        self._watched: dict[int, int] = {}  # descriptors of processes, and whose they are
        self._unwatched: dict[int, Process] = {}
        self._books = Books(charter, opened(charter.store, directory), directory.events, anew=anew)
        self._listeners = _listeners(charter.coordinator, charter.bind)
        for sock in (*self._listeners, self._wake_in):
            self._selector.register(sock, selectors.EVENT_READ)
        self._looked_s = time.monotonic()
        self._coordinator = Coordinator(charter, directory, self._books, self._watch, self._looked_s)

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            ExchangeError: the store failed, or another coordinator is in charge.
        """
        _LOG.info("the coordinator listens at %s", self._charter.coordinator)
        try:
            while not self._stop.is_set():
                self._turn()
        finally:
            self._end()

    def stop(self) -> None:
        """End `run`; members go on, and come back to whoever listens here next."""
        self._stop.set()
        self._wake()

    def _turn(self) -> None:
        ready = self._selector.select(_TURN_S)
        now_s = self._looked()
        for key, _ in ready:
            source = key.fileobj
            if isinstance(source, int):
                self._coordinator.ended(self._unwatch(source), now_s)
            elif source is self._wake_in:
                self._admit()
            elif source in self._listeners:
                self._accept(source)
            elif isinstance(source, socket.socket) and (peer := self._peers.get(source)) is not None:
                self._read(peer, now_s)
        self._look_at_processes(now_s)
        self._coordinator.settle(now_s)
        self._books.commit()
        for peer in list(self._peers.values()):
            self._write(peer)
        self._looked()

    def _looked(self) -> float:
        """Return the time; between two looks this process was away if that took long (stopped, or its store slow)."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _TURN_S + _AWAY * self._charter.terms.lease_s:
            self._coordinator.away(now_s)
        self._looked_s = now_s
        return now_s

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            if not self._strangers.acquire(blocking=False):
                sock.close()
                return
            threading.Thread(target=self._introduce, args=(sock,), name="introduce", daemon=True).start()

    def _introduce(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(True)
            authenticate(sock, self._secret, server=True)
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._known.put(sock)
            self._wake()
        except (ExchangeError, OSError) as error:
            _LOG.warning("a connection was turned away: %s", error)
            sock.close()
        finally:
            self._strangers.release()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0", socket.MSG_DONTWAIT)

    def _admit(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                sock = self._known.get_nowait()
                self._peers[sock] = _Peer(sock)
                self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, peer: _Peer, now_s: float) -> None:
        try:
            arrived = peer.sock.recv(1 << 20)
            for message in peer.incoming.feed(arrived):
                self._hear(peer, message, now_s)
        except BlockingIOError:
            return
        except OSError:
            arrived = b""
        except ExchangeError as error:
            _LOG.warning("a connection is closed: %s", error)
            arrived = b""
        if not arrived:
            self._drop(peer)
            self._coordinator.lose(peer, now_s)

    def _hear(self, peer: _Peer, message: Message, now_s: float) -> None:
        if peer.closing:
            return
        try:
            self._coordinator.hear(peer, message, now_s)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            _LOG.exception("a member said what cannot be: %s", str(message)[:200])
            peer.send({"answer": message.get("n", 0), "wrong": f"the coordinator cannot read this ({error!r})."})

    def _write(self, peer: _Peer) -> None:
        try:
            while peer.unsent:
                sent = peer.sock.send(peer.unsent)
                del peer.unsent[:sent]
        except BlockingIOError:
            if len(peer.unsent) > _UNSENT_BYTES:
                self._drop(peer)
                self._coordinator.lose(peer, time.monotonic())
                return
        except OSError:
            peer.unsent.clear()  # that it ended is read next
        if peer.closing:  # what a stopped process did not read it does not miss: it is told again when it comes back
            self._drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if self._selector.get_key(peer.sock).events != events:
            self._selector.modify(peer.sock, events)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.sock, None) is not None:
            self._selector.unregister(peer.sock)
            peer.sock.close()

    def _watch(self, id: int, process: Process) -> None:
        """Have the kernel say when a process ends, or look ourselves where it cannot."""
        if not process.visible:
            return
        try:
            descriptor = os.pidfd_open(process.pid)
        except (OSError, AttributeError):
            self._unwatched[id] = process
            return
        self._watched[descriptor] = id
        self._selector.register(descriptor, selectors.EVENT_READ)
        if not process.lives:  # its number is another's by now
            self._unwatch(descriptor)
            self._unwatched[id] = process

    def _unwatch(self, descriptor: int) -> int:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        return self._watched.pop(descriptor)

    def _look_at_processes(self, now_s: float) -> None:
        for id, process in list(self._unwatched.items()):
            if not process.lives:
                del self._unwatched[id]
                self._coordinator.ended(id, now_s)

    def _end(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer)
        for descriptor in list(self._watched):
            self._unwatch(descriptor)
        for sock in (*self._listeners, self._wake_in, self._wake_out):
            sock.close()
        self._selector.close()
        self._books.close()


def _listeners(address: Address, bind: str) -> list[socket.socket]:
    """Listen at an address, on an interface. A socket of a killed coordinator is replaced: the store is ours by now."""
    made: list[socket.socket] = []
    try:
        if address.unix:
            if len(os.fsencode(address.unix)) > UNIX_PATH_BYTES:
                raise ExchangeError(
                    f"the path of the coordinator's socket, {address.unix}, is longer than the {UNIX_PATH_BYTES} bytes "
                    "that the system allows; use a shorter one."
                )
            Path(address.unix).unlink(missing_ok=True)
            made.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            made[-1].bind(address.unix)
            os.chmod(address.unix, 0o600)
        if address.port:
            made.append(bound(bind, address.port))
    except OSError as error:
        raise ExchangeError(f"the coordinator cannot listen at {address}: {error.strerror}.") from error
    if not made:
        raise ExchangeError("the charter gives the coordinator neither a Unix socket nor a TCP port.")
    for sock in made:
        sock.listen(_STRANGERS)
        sock.setblocking(False)
    return made


def serve(directory: Directory, *, anew: bool = False, ready: Callable[[Service], None] | None = None) -> None:
    """Serve the job of a directory until stopped."""
    service = Service(directory.read(), directory, directory.read_secret(), anew=anew)
    if ready is not None:
        ready(service)
    service.run()
