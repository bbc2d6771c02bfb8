"""Shared memory without names: whoever ends, in whichever way, it is gone with the last process that maps it."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

from paceline.errors import ExchangeError

_SMALLEST: Final = 1 << 20
_SEALS: Final = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
_PATIENCE: Final = 64
"""Frames after which pages that none of them needed are given back."""


def available() -> bool:
    """Return whether this system has shared memory without names."""
    return hasattr(os, "memfd_create") and bool(_SEALS)


class Segment:
    """Memory that this process fills and its peer reads."""

    def __init__(self, least_bytes: int) -> None:
        """Make one of at least so many bytes; pages are taken when they are first written."""
        size = max(_SMALLEST, 1 << (least_bytes - 1).bit_length())
        self.file = os.memfd_create("paceline-wire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, size)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.file, size)
        except BaseException:
            os.close(self.file)
            raise
        self.memory = memoryview(self._map)
        self._touched = self._most = self._frames = 0

    @property
    def nbytes(self) -> int:
        """How much fits."""
        return len(self.memory)

    def close_file(self) -> None:
        """Close the descriptor, once the peer has it; the memory stays."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def use(self, count: int) -> None:
        """Note that `count` bytes will be used, nobody using any now; give back what has long not been needed."""
        self._touched, self._most = max(self._touched, count), max(self._most, count)
        self._frames += 1
        if self._frames < _PATIENCE:
            return
        keep = -(-self._most // mmap.PAGESIZE) * mmap.PAGESIZE
        if 2 * keep < self._touched and self._touched > _SMALLEST:
            self._map.madvise(mmap.MADV_REMOVE, keep)
            self._touched = keep
        self._most, self._frames = count, 0


def mapped(file: int) -> mmap.mmap:
    """Return the memory of a peer's segment, and close the descriptor. Writing to it disturbs nobody.

    Raises:
        ExchangeError: it is none, or could shrink under its reader.
    """
    try:
        size = os.fstat(file).st_size
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS or not size:
            raise ExchangeError("a peer's shared memory is not sealed; is its version of Paceline another?")
        return mmap.mmap(file, size)
    except OSError as error:
        raise ExchangeError(f"a peer's shared memory cannot be mapped: {error.strerror or error}.") from error
    finally:
        os.close(file)
