"""Updates: what is pushed, as one shard sees it. A shard is a function of the updates applied to it, in order."""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import Tensor

OUTSTANDING: Final = 1024
"""Pushes that a worker may have sent and not seen acknowledged: how far back a shard knows its sequences."""


class Part(NamedTuple):
    """What an update has for one table of a shard.

    Attributes:
        table: its index.
        keys: of a sparse table: [n] int64, each once; None for a dense one.
        values: gradients, not compressed: [n, width] of rows; of a dense table all its elements in this shard, range
            after range: [n].
    """

    table: int
    keys: Tensor | None
    values: Tensor


class Update(NamedTuple):
    """Gradients of the mean loss of some tasks, or of none (`tasks` empty: a plain addition to what is there).

    Attributes:
        worker: who pushes; with `sequence` it makes retries count once.
        sequence: rises with each push of a worker, from 1.
        tasks: what was computed; a task counts once, whoever computes it.
        read: position of the shard that the gradient was computed from, the oldest where there were several reads; -1:
            not known, or nothing of the shard was read.
        weight: what the mean counts by among the pieces of a BSP step (samples).
        parts: none where nothing of this shard was touched; clocks advance all the same.
    """

    worker: int
    sequence: int
    tasks: tuple[int, ...]
    read: int
    weight: float
    parts: tuple[Part, ...]


class Applied(NamedTuple):
    """What became of an update.

    Attributes:
        position: the shard's number of updates once this one was applied; of a repeated one, where it was applied, or
            that of now where it is only known that it was.
        staleness: updates that were applied between the read and this one.
        repeated: it had been applied before, and changed nothing now.
    """

    position: int
    staleness: int
    repeated: bool
