"""Messages of the portable group: sends and receives in any order, by tag, with buffers for those not yet wanted.

The sender writes into the ring that its window has for the receiver: a head (tag, bytes), then the payload, as far as
there is room. Whoever waits moves everybody's bytes; a thread does so as long as something is open and nobody waits.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from torch import Tensor

from paceline.shm.portable.peers import Peers
from paceline.shm.portable.window import Bytes
from paceline.shm.portable.work import PortableWork

_HEAD = struct.Struct("qq")
_LEAVING_S = 2.0
_LOOK_S = 0.05


@dataclass(eq=False)
class _Send:
    work: PortableWork
    to: int
    tag: int
    data: Bytes
    deadline: float
    written: int = -1  # bytes of the payload, after the head

    @property
    def name(self) -> str:
        return f"send(tag {self.tag}, {self.data.size} bytes)"


@dataclass(eq=False)
class _Receive:
    work: PortableWork
    source: int | None
    tag: int
    data: Bytes
    stored: Callable[[], None]
    deadline: float

    @property
    def name(self) -> str:
        return f"recv(tag {self.tag}, {self.data.size} bytes)"


@dataclass(eq=False)
class _Message:
    """One that arrives or has arrived: in the tensor of its receiver, or in a buffer until somebody wants it."""

    source: int
    tag: int
    data: Bytes
    receive: _Receive | None
    read: int = 0


@dataclass
class _Traffic:
    sends: dict[int, deque[_Send]] = field(default_factory=dict)
    receives: list[_Receive] = field(default_factory=list)
    arriving: dict[int, _Message] = field(default_factory=dict)
    early: list[_Message] = field(default_factory=list)

    def is_open(self) -> bool:
        return bool(self.receives) or any(self.sends.values()) or any(m.receive for m in self.arriving.values())


class Messages:
    """The messages of one rank. Ranks are those of the group."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._state = threading.Condition()
        self._traffic = _Traffic()
        self._drivers = 0
        self._looked = 0.0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def send(self, tensor: Tensor, data: Bytes, to: int, tag: int, seconds: float) -> PortableWork:
        """Send the bytes of a tensor."""
        work = PortableWork([tensor], self._drive)
        with self._state:
            self._check()
            send = _Send(work, to, tag, data, time.monotonic() + seconds)
            self._traffic.sends.setdefault(to, deque()).append(send)
            self._start()
        return work

    def receive(
        self, tensor: Tensor, data: Bytes, stored: Callable[[], None], source: int | None, tag: int, seconds: float
    ) -> PortableWork:
        """Receive into the bytes of a tensor, from anybody if `source` is None; call `stored` when they are there."""
        work = PortableWork([tensor], self._drive)
        with self._state:
            self._check()
            receive = _Receive(work, source, tag, data, stored, time.monotonic() + seconds)
            early = next((message for message in self._traffic.early if _fits(receive, message)), None)
            if early is None:
                self._traffic.receives.append(receive)
            else:
                self._traffic.early.remove(early)
                early.receive = receive
                if early.read == early.data.size:
                    self._deliver(early)
            self._start()
        return work

    def drain(self, seconds: float) -> None:
        """Return when all that was sent has been written, or when time is up."""
        deadline = time.monotonic() + seconds
        while any(self._traffic.sends.values()) and time.monotonic() < deadline:
            self._step()

    def close(self) -> None:
        """Move nothing more."""
        with self._state:
            self._is_closed = True
            self._drop(dist.DistBackendError("shm: the group was shut down"))
            self._state.notify_all()
        self._peers.own.bell.bump()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LEAVING_S)

    def _check(self) -> None:
        if self._is_closed:
            raise dist.DistBackendError("shm: the group was shut down")
        self._peers.check()

    def _start(self) -> None:
        """Move what can be moved at once; leave the rest to the thread."""
        self._progress()
        if self._traffic.is_open() and self._drivers == 0:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shm-messages", daemon=True)
                self._thread.start()
            self._state.notify_all()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._is_closed or (self._traffic.is_open() and self._drivers == 0))
                if self._is_closed:
                    return
            self._step()

    def _drive(self, work: PortableWork, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._state:
            self._drivers += 1
        try:
            while not work.is_completed() and (deadline is None or time.monotonic() < deadline):
                self._step()
        finally:
            with self._state:
                self._drivers -= 1
                self._state.notify_all()

    def _step(self) -> None:
        """Move what can be moved, or wait a little for a peer."""
        bell = self._peers.own.bell
        seen = bell.value
        with self._state:
            if self._is_closed or self._progress():
                return
        self._peers.doze(bell, seen)
        if time.monotonic() > self._looked + _LOOK_S:
            with self._state:
                self._look()

    def _progress(self) -> bool:
        moved = False
        try:
            for sends in self._traffic.sends.values():
                while sends and self._write(sends[0]):
                    moved = True
                    if sends[0].written < sends[0].data.size:
                        break
                    sends.popleft().work.finish()
            for source in range(self._peers.size):
                if source != self._peers.rank and self._traffic.is_open():
                    moved |= self._read(source)
        except dist.DistBackendError as error:
            self._drop(error)
        return moved

    def _write(self, send: _Send) -> bool:
        """Write as much as there is room for; tell whether that was anything."""
        window, ring = self._peers.own, self._peers.own.rings[send.to]
        sent = window.sent[send.to]
        room = ring.size - (sent - self._peers.window(send.to).taken[self._peers.rank])
        self._peers.fence()
        begun = send.written
        if begun < 0:
            if room < _HEAD.size:
                return False
            head = np.frombuffer(_HEAD.pack(send.tag, send.data.size), np.uint8)
            _put(ring, sent, head)
            sent, room, begun = sent + head.size, room - head.size, 0
        part = send.data[begun : begun + room]
        if not part.size and send.written >= 0:
            return False
        _put(ring, sent, part)
        send.written = begun + part.size
        self._peers.fence()
        window.sent[send.to] = sent + part.size
        self._peers.window(send.to).bell.bump()
        return True

    def _read(self, source: int) -> bool:
        """Take what has come from a rank; tell whether that was anything."""
        window, ring = self._peers.window(source), self._peers.window(source).rings[self._peers.rank]
        taken = begun = self._peers.own.taken[source]
        there = window.sent[self._peers.rank] - taken
        self._peers.fence()
        while True:
            message = self._traffic.arriving.get(source)
            if message is None:
                if there < _HEAD.size:
                    break
                head = np.empty(_HEAD.size, np.uint8)
                _get(ring, taken, head)
                taken, there = taken + head.size, there - head.size
                message = self._expect(source, *_HEAD.unpack(head.tobytes()))
            part = message.data[message.read : message.read + there]
            _get(ring, taken, part)
            taken, there, message.read = taken + part.size, there - part.size, message.read + part.size
            if message.read < message.data.size:
                break
            del self._traffic.arriving[source]
            if message.receive is not None:
                self._deliver(message)
        if taken == begun:
            return False
        self._peers.fence()
        self._peers.own.taken[source] = taken
        window.bell.bump()
        return True

    def _expect(self, source: int, tag: int, size: int) -> _Message:
        """Find out where the message whose head has come is to go."""
        message = _Message(source, tag, np.empty(0, np.uint8), None)
        receive = next((receive for receive in self._traffic.receives if _fits(receive, message)), None)
        if receive is not None:
            self._traffic.receives.remove(receive)
            message.receive = receive
            self._compare(receive, source, size)
            message.data = receive.data
        else:
            message.data = np.empty(size, np.uint8)
            self._traffic.early.append(message)
        self._traffic.arriving[source] = message
        return message

    def _deliver(self, message: _Message) -> None:
        receive = message.receive
        assert receive is not None
        if message.data is not receive.data:
            self._compare(receive, message.source, message.data.size)
            receive.data[:] = message.data
        receive.stored()
        receive.work.finish(source=message.source)

    def _compare(self, receive: _Receive, source: int, size: int) -> None:
        if size != receive.data.size:
            error = self._peers.fail(f"{receive.name}: {self._peers.name(source)} sent {size} bytes with this tag")
            receive.work.finish(error)
            raise error

    def _look(self) -> None:
        """Give up if one that we wait for will not come: it died, left or is too late."""
        self._looked = time.monotonic()
        others = [rank for rank in range(self._peers.size) if rank != self._peers.rank]
        gone = {rank: reason for rank in others if (reason := self._peers.gone(rank)) is not None}
        # What they wrote before they went is still there.
        if self._progress():
            return
        try:
            self._peers.check()
            for sends in self._traffic.sends.values():
                for send in sends:
                    self._judge(send.name, [send.to], gone, send.deadline)
            waiting = [message.receive for message in self._traffic.arriving.values() if message.receive is not None]
            for receive in [*self._traffic.receives, *waiting]:
                sources = others if receive.source is None else [receive.source]
                self._judge(receive.name, sources, gone, receive.deadline)
        except dist.DistBackendError as error:
            self._drop(error)

    def _judge(self, name: str, ranks: list[int], gone: dict[int, str], deadline: float) -> None:
        missing = [gone[rank] for rank in ranks if rank in gone]
        # One of many that has left in good order may have said all that it had to say.
        lost = [gone[rank] for rank in ranks if rank in gone and not self._peers.window(rank).is_closed]
        if lost or len(missing) == len(ranks):
            raise self._peers.fail(f"{name}: {(lost or missing)[0]}")
        if self._looked > deadline:
            names = ", ".join(self._peers.name(rank) for rank in ranks)
            raise self._peers.fail(f"{name}: {names} did not answer before the timeout")

    def _drop(self, error: BaseException) -> None:
        traffic, self._traffic = self._traffic, _Traffic()
        works = [send.work for sends in traffic.sends.values() for send in sends]
        works += [receive.work for receive in traffic.receives]
        works += [message.receive.work for message in traffic.arriving.values() if message.receive is not None]
        for work in works:
            work.finish(error)


def _fits(receive: _Receive, message: _Message) -> bool:
    return receive.tag == message.tag and receive.source in (None, message.source)


def _put(ring: Bytes, position: int, data: Bytes) -> None:
    start = position % ring.size
    first = min(data.size, ring.size - start)
    ring[start : start + first] = data[:first]
    ring[: data.size - first] = data[first:]


def _get(ring: Bytes, position: int, data: Bytes) -> None:
    start = position % ring.size
    first = min(data.size, ring.size - start)
    data[:first] = ring[start : start + first]
    data[first:] = ring[: data.size - first]
