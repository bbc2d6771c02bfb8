"""Shared memory of the portable group: one window per rank, and counters that processes can sleep on.

A window is a `memfd`: it has no name, and the kernel frees it with its last mapping, so that nothing stays behind
whichever way a process ends. Its rank alone writes to it, except for the bell, which peers ring.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_SIGNATURE = b"paceline portable 1"
TOKEN_BYTES = 16
_STAGING_BYTES = 2 << 20  # of each of the two halves
_RING_BYTES = 1 << 20  # of the messages to one rank
_TEXT_BYTES = 512
_OPEN, _CLOSED, _FAILED = 0, 1, 2

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAIT, _FUTEX_WAKE, _FUTEX_WAKE_OP = 0, 1, 5
_ADD_ONE = 1 << 28 | 1 << 12
_EVERYBODY = 2**31 - 1


@functools.cache
def _futex() -> Callable[..., int] | None:
    """Return the system call, or None on a machine whose number for it we do not know."""
    number = _FUTEX_CALL.get(platform.machine())
    if number is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    call = ctypes.CDLL(None).syscall
    pointer, whole = ctypes.c_void_p, ctypes.c_long
    call.argtypes = [whole, pointer, ctypes.c_int, ctypes.c_uint32, pointer, pointer, ctypes.c_uint32]
    return functools.partial(call, number)


class Word:
    """A counter of 32 bits in shared memory that processes can sleep on. Without futexes they look now and then."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._cell = memoryview(memory)[offset : offset + 4].cast("I")
        self._address = ctypes.addressof(ctypes.c_uint32.from_buffer(memory, offset))
        self._futex = _futex()

    @property
    def value(self) -> int:
        """What it counts to, modulo 2**32."""
        return self._cell[0]

    def bump(self) -> None:
        """Add one, in one step whoever else does, and wake who sleeps on it."""
        if self._futex is None:
            self._cell[0] = (self._cell[0] + 1) % 2**32
        else:
            self._futex(self._address, _FUTEX_WAKE_OP, _EVERYBODY, 1, self._address, _ADD_ONE)

    def wake(self) -> None:
        """Wake who sleeps on it, so that they look around."""
        if self._futex is not None:
            self._futex(self._address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def sleep(self, seen: int, seconds: float) -> None:
        """Return when it is no longer `seen`, or after `seconds`, or earlier."""
        if self._futex is None:
            time.sleep(min(seconds, 0.001))
        else:
            limit = struct.pack("qq", int(seconds), int(seconds % 1 * 1e9))
            self._futex(self._address, _FUTEX_WAIT, seen, ctypes.c_char_p(limit), None, 0)


@dataclass(frozen=True)
class _Layout:
    """Where things lie in a window of a group of `size` ranks, in bytes."""

    size: int

    posted = 128
    bell = 192
    state = 256
    text = 260
    counters = 1024

    @property
    def call_bytes(self) -> int:
        return _TEXT_BYTES + 16 * self.size

    @property
    def calls(self) -> int:
        return self.counters + 16 * self.size

    @property
    def staging(self) -> int:
        return (self.calls + 2 * self.call_bytes + 4095) // 4096 * 4096

    @property
    def rings(self) -> int:
        return self.staging + 2 * _STAGING_BYTES

    @property
    def total(self) -> int:
        return self.rings + self.size * _RING_BYTES


class Window:
    """The memory of one rank as all ranks of the group see it."""

    def __init__(self, file: int, size: int) -> None:
        at = _Layout(size)
        self._at = at
        self._memory = mmap.mmap(file, at.total)
        everything: Bytes = np.frombuffer(self._memory, np.uint8)
        longs = memoryview(self._memory)[at.counters : at.calls].cast("Q")
        self.posted = Word(self._memory, at.posted)
        self.bell = Word(self._memory, at.bell)
        self.sent = longs[:size]  # bytes ever sent to each rank
        self.taken = longs[size:]  # bytes ever taken from each rank
        halves = range(at.staging, at.rings, _STAGING_BYTES)
        self.staging = [everything[half : half + _STAGING_BYTES] for half in halves]
        self.rings = [everything[ring : ring + _RING_BYTES] for ring in range(at.rings, at.total, _RING_BYTES)]

    @staticmethod
    def size_for(size: int) -> int:
        """Return how many bytes a window takes (of address space: pages that are not used take no memory)."""
        return _Layout(size).total

    def sign(self, token: bytes) -> None:
        """Say whose window this is."""
        self._memory[: len(_SIGNATURE) + TOKEN_BYTES] = _SIGNATURE + token

    def is_signed(self, token: bytes) -> bool:
        """Tell whether this is the window that `token` was given out for."""
        return secrets.compare_digest(self._memory[: len(_SIGNATURE) + TOKEN_BYTES], _SIGNATURE + token)

    def describe(self, half: int, text: bytes, table: bytes) -> bytes:
        """Publish what this rank calls, with a table of `2 * size` 64-bit numbers or none; return the text's form."""
        start = self._at.calls + half * self._at.call_bytes
        packed = struct.pack("I", len(text)) + text
        self._memory[start : start + len(packed)] = packed
        if table:
            self._memory[start + _TEXT_BYTES : start + _TEXT_BYTES + len(table)] = table
        return packed

    def says(self, half: int, packed: bytes) -> bool:
        """Tell whether this rank published the same text."""
        start = self._at.calls + half * self._at.call_bytes
        return self._memory[start : start + len(packed)] == packed

    def called(self, half: int) -> str:
        """Return the text that this rank published, for an error message."""
        start = self._at.calls + half * self._at.call_bytes
        return self._text(start)

    def table(self, half: int) -> npt.NDArray[np.int64]:
        """Return the table that this rank published."""
        start = self._at.calls + half * self._at.call_bytes + _TEXT_BYTES
        return np.frombuffer(self._memory[start : start + 16 * self._at.size], np.int64)

    def close(self) -> None:
        """Say that this rank has left the group."""
        if self._memory[self._at.state] == _OPEN:
            self._memory[self._at.state] = _CLOSED

    def give_up(self, text: str) -> None:
        """Say that this rank cannot go on, and why."""
        data = text.encode()[: _TEXT_BYTES - 4]
        self._memory[self._at.text : self._at.text + 4 + len(data)] = struct.pack("I", len(data)) + data
        self._memory[self._at.state] = _FAILED

    @property
    def is_closed(self) -> bool:
        """Whether this rank has left the group."""
        return self._memory[self._at.state] == _CLOSED

    @property
    def failure(self) -> str | None:
        """Why this rank cannot go on."""
        return self._text(self._at.text) if self._memory[self._at.state] == _FAILED else None

    def _text(self, start: int) -> str:
        (length,) = struct.unpack("I", self._memory[start : start + 4])
        return self._memory[start + 4 : start + 4 + min(length, _TEXT_BYTES - 4)].decode(errors="replace")
