"""Which shard holds which key: a function of the job alone, so that nobody has to ask.

Dense parameters are cut into ranges that are dealt out evenly; rows go by a hash of their key. Which server holds a
shard is another matter, and changes (`view.py`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.exchange.job import DenseTable, Job

_SMALLEST: Final = 4096
"""Elements below which a range is not worth a part of a message."""


@dataclass(frozen=True)
class DenseRange:
    """Elements `start` to `stop` of a dense table, flattened, which live in a shard."""

    table: int
    start: int
    stop: int
    shard: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def dense_ranges(job: Job) -> tuple[DenseRange, ...]:
    """Return the ranges of all dense tables, in the order of tables and elements.

    Largest first, each to the shard that has least: within a range of even (Graham, 1969).
    """
    total = sum(table.count for table in job.tables if isinstance(table, DenseTable))
    most = max(_SMALLEST, -(-total // job.shards))
    pieces = [
        (min(most, table.count - start), index, start)
        for index, table in enumerate(job.tables)
        if isinstance(table, DenseTable)
        for start in range(0, table.count, most)
    ]
    loads = [(0, shard) for shard in range(job.shards)]
    dealt = []
    for count, table, start in sorted(pieces, key=lambda piece: (-piece[0], piece[1:])):
        load, shard = heapq.heappop(loads)
        heapq.heappush(loads, (load + count, shard))
        dealt.append(DenseRange(table, start, start + count, shard))
    return tuple(sorted(dealt, key=lambda held: (held.table, held.start)))


def mixed(keys: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well mixed bits of 64-bit keys: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = keys.view(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shards_of(keys: NDArray[np.int64], shards: int) -> NDArray[np.int64]:
    """Return the shard of each key. keys: [n] -> [n].

    By the upper bits of the mixed key, so that what is hashed again within a shard (by the lower ones) stays spread.
    """
    return ((mixed(keys) >> np.uint64(32)) * np.uint64(shards) >> np.uint64(32)).view(np.int64)
