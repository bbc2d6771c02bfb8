"""Frames between processes of one host: heads over a Unix socket, tensors in shared memory.

A sender copies tensors into a *segment*, which the receiver maps too and reads where they lie: one copy in all. Whose
turn a segment is, is told over a second socket: the receiver returns its number once it is done with the frame, and
the sender waits for one that is free. There are at most two for each direction, made when they are first needed, so
that one frame can be filled while another is read. Small tensors go with the head: copies by the system cost less than
a turn. A large frame's head goes first, and its tensors follow by chunks (see `chunks`): a receiver who wants them
elsewhere asks for them over the second socket, by the number 0, and copies on what is there.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
from collections.abc import Sequence
from mmap import mmap
from typing import Final

from torch import Tensor

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.wire.chunks import CHUNK_BYTES, await_all, copy, give, take
from paceline.exchange.wire.codec import in_segment, nbytes, views_of
from paceline.exchange.wire.frame import Frame, Meta, Placing
from paceline.exchange.wire.guarded import Guarded
from paceline.exchange.wire.memory import aligned, offsets, tensors_in
from paceline.exchange.wire.segments import Segment, mapped
from paceline.exchange.wire.sockets import SocketConnection, send_all

_INLINE_BYTES: Final = 128 << 10
_CHUNKED_BYTES: Final = 2 * CHUNK_BYTES
"""Of tensors, from which on they are told of by chunks."""
_SEGMENTS: Final = 2
_ASK: Final = 0
_PATIENCE_MS: Final = 2
"""How long to wait for a segment before another is made: who has just answered returns it in a moment."""


class SharedConnection(SocketConnection):
    """Frames over a Unix socket and shared memory; see `frame.Connection`."""

    _ahead = False  # descriptors come with frames
    _most_bytes = _INLINE_BYTES - 1

    def __init__(self, sock: socket.socket, turns: socket.socket, name: str = "a peer") -> None:
        """Take a connected Unix socket, and another between the same two processes for turns."""
        super().__init__(sock, name)
        self._turns = Guarded(turns, name)
        self._segments: list[Segment] = []
        self._free: set[int] = set()
        self._theirs: dict[int, mmap] = {}
        self._arrived: list[int] = []
        self._held = 0
        self._asked = False  # the thread that sends has it

    def receive(self, place: Placing | None = None) -> Frame:
        """Wait for a frame; see `frame.Connection`."""
        self._give_back()
        return super().receive(place)

    def close(self) -> None:
        """End the connection; see `frame.Connection`."""
        super().close()
        self._turns.close()

    def _send(self, sock: socket.socket, first: bytes, views: list[memoryview]) -> None:
        if sum(map(len, views)) <= self._most_bytes:
            return super()._send(sock, first, views)
        self._asked = False
        number, starts = self._turn(views)
        segment = self._segments[number]
        places = [segment.memory[start : start + len(view)] for start, view in zip(starts, views, strict=True)]
        large = sum(map(len, views)) >= _CHUNKED_BYTES
        if not large:
            for place, view in zip(places, views, strict=True):
                copy(place, view)
        first = in_segment(first, number + 1)
        if segment.file >= 0:  # the peer has not got it yet
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.file]))]
            first = first[sock.sendmsg([first], rights) :]
            segment.close_file()
        send_all(sock, [first] if first else [])
        if large:
            give(sock, places, views, self._is_asked)

    def _turn(self, views: Sequence[memoryview]) -> tuple[int, list[int]]:
        """Return a segment that is free and has room, and where in it tensors shall lie."""
        starts, total = aligned(map(len, views))
        self._collect(0)
        if self._segments and not self._free:
            self._collect(_PATIENCE_MS)
        while len(self._segments) == _SEGMENTS and not self._free:
            self._collect(None)
        fitting = [number for number in self._free if self._segments[number].nbytes >= total]
        if fitting:
            number = min(fitting, key=lambda number: self._segments[number].nbytes)
        elif len(self._segments) < _SEGMENTS:
            number = len(self._segments)
            self._segments.append(Segment(total))
        else:
            number = next(iter(self._free))
            self._segments[number] = Segment(total)
        self._free.discard(number)
        self._segments[number].use(total)
        for idle in self._free:
            self._segments[idle].use(0)
        return number, starts

    def _is_asked(self) -> bool:
        """Return whether the peer asks for the chunks of this frame."""
        if not self._asked:
            self._collect(0)
        return self._asked

    def _collect(self, patience_ms: int | None) -> None:
        """Note what the peer says of segments; where it says nothing, wait, None: for as long as it takes."""
        with self._turns as turns:
            poll = select.poll()
            poll.register(turns, select.POLLIN)
            if not poll.poll(patience_ms):
                return
            numbers = turns.recv(_SEGMENTS)
            if not numbers:
                raise ConnectionLost(f"{self._turns.name} is gone; it was reading a frame.")
            for number in numbers:
                if number == _ASK:
                    self._asked = True
                    continue
                if not 0 < number <= len(self._segments) or number - 1 in self._free:
                    raise ExchangeError(f"{self._turns.name} returned memory {number}, which it did not have.")
                self._free.add(number - 1)

    def _hear(self, sock: socket.socket, into: bytearray) -> int:
        flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
        count, notes, _, _ = sock.recvmsg_into([into], socket.CMSG_SPACE(4), flags)
        for level, kind, data in notes:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._arrived += array.array("i", data[: len(data) - len(data) % 4])
        return count

    def _receive(
        self, sock: socket.socket, segment: int, wanted: list[Tensor] | None, metas: Sequence[Meta]
    ) -> list[Tensor]:
        arrived, self._arrived = self._arrived if self._wire is None else self._wire.files(), []
        if not segment:
            return super()._receive(sock, segment, wanted, metas)
        for file in arrived:
            self._theirs[segment] = mapped(file)
        starts, total = offsets(metas)
        memory = self._theirs.get(segment)
        if memory is None or segment > _SEGMENTS or total > len(memory):
            raise ExchangeError(
                f"tensors of {total} bytes are said to lie in memory {segment}, which has no such room."
            )
        tensors = tensors_in(memory, metas, starts)
        self._held = segment
        count = sum(map(nbytes, metas))
        large = count >= _CHUNKED_BYTES
        if wanted is None:
            if large:
                await_all(sock, count)
            return tensors
        if large:
            self._say(_ASK)
            take(sock, views_of(wanted), views_of(tensors))
        else:
            for place, tensor in zip(wanted, tensors, strict=True):
                place.view(-1).copy_(tensor.view(-1))
        self._give_back()
        return wanted

    def _give_back(self) -> None:
        """Let the peer use the memory of the frame that was received last."""
        number, self._held = self._held, 0
        if number:
            self._say(number)

    def _say(self, number: int) -> None:
        """Tell the peer of a segment that it may use, or that this end asks for chunks."""
        # Where the peer is gone, what it sent before can still be received.
        with contextlib.suppress(ConnectionLost), self._turns as turns:
            turns.sendall(bytes([number]))
