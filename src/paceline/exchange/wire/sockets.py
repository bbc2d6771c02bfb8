"""Frames over a stream socket: TCP or Unix. Tensors are sent from where they lie and received where they shall lie."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.wire.choice import Wire, chosen
from paceline.exchange.wire.codec import HEAD_BYTES, MAX_TENSOR_BYTES, announced, encoded, head, views_of
from paceline.exchange.wire.frame import Frame, Meta, Placing
from paceline.exchange.wire.guarded import Guarded
from paceline.exchange.wire.memory import Memory, placed

_PIECES: Final = max(16, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 1024)
"""Most pieces of memory that one system call takes."""


def tune(sock: socket.socket) -> None:
    """Set what a connection for frames wants: no delay, and a word from the kernel when the peer's host is gone."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def send_all(sock: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    """Send all of this, in as few calls as can be."""
    at = 0
    while at < len(pieces):
        batch = [memoryview(piece) for piece in pieces[at : at + _PIECES]]
        at += len(batch)
        while batch:
            batch = _after(batch, sock.sendmsg(batch))


def receive_all(sock: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Fill all of this.

    Raises:
        ConnectionLost: the peer closed the connection first.
    """
    at = 0
    while at < len(pieces):
        batch = list(pieces[at : at + _PIECES])
        at += len(batch)
        while batch:
            if len(batch) == 1:
                count = sock.recv_into(batch[0], 0, socket.MSG_WAITALL)
            else:
                count = sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
            if not count:
                raise ConnectionLost("the peer went away in the middle of a frame.")
            batch = _after(batch, count)


def _after(pieces: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of pieces after some bytes."""
    for number, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[number + 1 :]]
        count -= len(piece)
    return []


class SocketConnection:
    """Frames over one socket; see `frame.Connection`."""

    _ahead = True
    """All that comes over the socket are frames."""
    _most_bytes = MAX_TENSOR_BYTES
    """Of tensors that simply follow their head."""

    def __init__(self, sock: socket.socket, name: str = "a peer") -> None:
        """Take a connected socket, of which nobody else reads or writes any more. name: of the peer, in errors."""
        tune(sock)
        self._sent_bytes = self._received_bytes = 0
        self._sending = threading.Lock()
        self._memory = Memory()
        self._head = bytearray(HEAD_BYTES)
        native = chosen()
        self._socket = Guarded(sock, name, native.users() if native else None)
        self._wire: Wire | None = None
        if native:
            self._wire = native.wire(self._socket, self._sending, ahead=self._ahead, most_bytes=self._most_bytes)
            self._send_whole, self._receive_whole = self._wire.send, self._wire.receive

    @property
    def sent_bytes(self) -> int:
        """See `frame.Connection`."""
        return self._sent_bytes + (self._wire.sent_bytes if self._wire else 0)

    @property
    def received_bytes(self) -> int:
        """See `frame.Connection`."""
        return self._received_bytes + (self._wire.received_bytes if self._wire else 0)

    def send(self, frame: Frame) -> None:
        """Send a frame; see `frame.Connection`."""
        if self._wire:
            try:
                if self._send_whole(frame):
                    return
            except BaseException as error:
                self._socket.failed(error)
        first, views = encoded(frame)
        with self._sending, self._socket as sock:
            self._send(sock, first, views)
            self._sent_bytes += len(first) + sum(map(len, views))

    def receive(self, place: Placing | None = None) -> Frame:
        """Wait for a frame; see `frame.Connection`."""
        if not self._wire:
            return self._received(place)
        try:
            read = self._receive_whole(place)
        except BaseException as error:
            self._socket.failed(error)
        if isinstance(read, Frame):
            return read
        if read is None:
            self._socket.close()
            raise ConnectionLost(f"{self._socket.name} closed the connection.")
        frame, segment, metas = read
        with self._socket as sock:
            frame.tensors = self._receive(sock, segment, placed(place, frame, metas), metas)
        return frame

    def _received(self, place: Placing | None) -> Frame:
        """Wait for a frame and read it in Python."""
        with self._socket as sock:
            count = self._hear(sock, self._head)
            if not count:
                raise ConnectionLost(f"{self._socket.name} closed the connection.")
            receive_all(sock, [memoryview(self._head)[count:]] if count < HEAD_BYTES else [])
            read = head(self._head)
            rest = bytearray(read.rest_bytes)
            receive_all(sock, [memoryview(rest)] if rest else [])
            frame, metas = announced(read, rest)
            if metas:
                frame.tensors = self._receive(sock, read.segment, placed(place, frame, metas), metas)
            self._received_bytes += HEAD_BYTES + len(rest) + sum(tensor.nbytes for tensor in frame.tensors)
        return frame

    def close(self) -> None:
        """End the connection; see `frame.Connection`."""
        self._socket.close()

    def _send(self, sock: socket.socket, first: bytes, views: list[memoryview]) -> None:
        """Send a frame's head and rest, then its tensors."""
        send_all(sock, [first, *views])

    def _hear(self, sock: socket.socket, into: bytearray) -> int:
        """Receive the first bytes of a frame; return how many."""
        return sock.recv_into(into, 0, socket.MSG_WAITALL)

    def _receive(
        self, sock: socket.socket, segment: int, wanted: list[Tensor] | None, metas: Sequence[Meta]
    ) -> list[Tensor]:
        """Receive tensors, where they are wanted or in memory of this connection."""
        if segment:
            raise ExchangeError("a frame's tensors are said to lie in shared memory; this connection has none.")
        tensors, pieces = self._memory.tensors(metas) if wanted is None else (wanted, views_of(wanted))
        self._fill(sock, pieces)
        return tensors

    def _fill(self, sock: socket.socket, pieces: list[memoryview]) -> None:
        """Receive the bytes of tensors."""
        receive_all(sock, pieces)
