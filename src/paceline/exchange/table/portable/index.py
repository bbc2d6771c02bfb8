"""Where the row of a key is: a hash table with open addressing, looked up for many keys at once."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.exchange.layout import mixed

_SMALLEST: Final = 64


class Index:
    """Numbers of rows by key, in the order in which keys were added."""

    def __init__(self) -> None:
        self._rows = np.full(_SMALLEST, -1, dtype=np.int64)
        self._keys = np.zeros(_SMALLEST, dtype=np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        """What it takes."""
        return self._rows.nbytes + self._keys.nbytes

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each key, -1 where there is none. keys: [n] -> [n]."""
        found = np.full(len(keys), -1, dtype=np.int64)
        mask = len(self._rows) - 1
        waiting = np.arange(len(keys))
        slots = self._homes(keys)
        while waiting.size:
            rows = self._rows[slots]
            same = (rows >= 0) & (self._keys[slots] == keys[waiting])
            found[waiting[same]] = rows[same]
            going_on = (rows >= 0) & ~same
            waiting, slots = waiting[going_on], (slots[going_on] + 1) & mask
        return found

    def add(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give rows to keys that have none, each given once; return their rows. keys: [n] -> [n]."""
        rows = np.arange(self._count, self._count + len(keys))
        if (self._count + len(keys)) * 4 > len(self._rows) * 3:
            self._grow(self._count + len(keys))
        self._count += len(keys)
        self._place(keys, rows)
        return rows

    def _place(self, keys: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        mask = len(self._rows) - 1
        waiting = np.arange(len(keys))
        slots = self._homes(keys)
        while waiting.size:
            free = self._rows[slots] < 0
            self._rows[slots[free]] = rows[waiting[free]]  # of several keys for one slot, the last one has it
            got = free & (self._rows[slots] == rows[waiting])
            self._keys[slots[got]] = keys[waiting[got]]
            waiting, slots = waiting[~got], (slots[~got] + 1) & mask

    def _grow(self, count: int) -> None:
        kept = self._rows >= 0
        keys, rows = self._keys[kept], self._rows[kept]
        size = len(self._rows)
        while count * 4 > size * 3:
            size *= 2
        self._rows, self._keys = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.int64)
        self._place(keys, rows)

    def _homes(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        homes: NDArray[np.int64] = (mixed(keys) & np.uint64(len(self._rows) - 1)).view(np.int64)
        return homes
