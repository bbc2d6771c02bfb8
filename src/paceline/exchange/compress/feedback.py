"""Compression with error feedback: what was left out of a gradient is added to the next one of the same parameters.

So nothing is lost, only late (Seide et al., 2014; Stich and Karimireddy, 2020). What is kept is this worker's own: when
it ends, what it still had to say is lost.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.compress.codec import Codec, Identity, Slot
from paceline.exchange.compress.names import parse
from paceline.exchange.job import DenseTable, Initializer, Job, Rule
from paceline.exchange.layout import dense_ranges
from paceline.exchange.table.sparse import KEYS, VALUES, Sparse

_COMPUTED: Final = {torch.float64: torch.float64}
"""In what type what is left is kept; float32 for others."""


@dataclass
class Figures:
    """What compression did so far.

    Attributes:
        given_bytes: before it.
        made_bytes: after it.
        seconds: that it took.
    """

    given_bytes: int = 0
    made_bytes: int = 0
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times smaller."""
        return self.given_bytes / self.made_bytes if self.made_bytes else 1.0


class Compression:
    """What gradients of a job's tables go through, on one worker. For one thread."""

    def __init__(self, job: Job, dense: Codec, rows: Codec | None = None) -> None:
        """Compress dense tables by one codec and rows by another.

        Raises:
            ExchangeError: the codec of rows is not for rows.
        """
        self._job, self._dense, self._rows = job, dense, rows or Identity()
        if not self._rows.rows:
            raise ExchangeError(
                f"rows of sparse tables cannot go as {self._rows}: they are few already, and no matrix; "
                "use none, bfloat16, float16 or int8."
            )
        self._slots: dict[tuple[int, int], Slot] = {}
        self._left: dict[tuple[int, int], Tensor] = {}
        self._left_of_rows: dict[tuple[int, int], Sparse] = {}
        self.figures: Final = Figures()

    @classmethod
    def of(cls, job: Job, text: str) -> Self:
        """Return what a recipe names. Rows go through it too if it is for rows, else as they are.

        Raises:
            ExchangeError: there is no such codec.
        """
        codec = parse(text)
        return cls(job, codec, codec if codec.rows else None)

    @property
    def memory_bytes(self) -> int:
        """What is kept takes."""
        kept = [*self._left.values(), *(x for slot in self._slots.values() for x in slot.kept.values())]
        return sum(x.nbytes for x in kept) + sum(rows.memory_bytes for rows in self._left_of_rows.values())

    def number(self, table: int) -> int:
        """The number of the codec that a table goes through; 0: none."""
        return (self._dense if isinstance(self._job.tables[table], DenseTable) else self._rows).number

    def encode(self, table: int, shard: int, values: Tensor, keys: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return what is sent of a slice, and keep what that leaves out for the next one.

        Args:
            table: its index.
            shard: whose slice it is.
            values: [n] elements of a dense table, all of that shard; or [n, width] rows.
            keys: of rows, [n] int64, each once.
        """
        start = time.perf_counter()
        made = self._of_elements(table, shard, values) if keys is None else self._of_rows(table, shard, values, keys)
        self.figures.given_bytes += values.nbytes
        self.figures.made_bytes += sum(x.nbytes for x in made)
        self.figures.seconds += time.perf_counter() - start
        return made

    def _of_elements(self, table: int, shard: int, values: Tensor) -> tuple[Tensor, ...]:
        where = table, shard
        left = self._left.get(where)
        if left is None:
            left = self._left[where] = torch.zeros(values.shape, dtype=_COMPUTED.get(values.dtype, torch.float32))
            self._slots[where] = self._slot(table, shard)
        left.add_(values.detach())
        return _sent(self._dense, left, self._slots[where])

    def _of_rows(self, table: int, shard: int, values: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        kept = self._left_of_rows.get((table, shard))
        if kept is None:
            kept = Sparse(values.shape[1], values.dtype, Rule("sgd"), Initializer(), 0)
            self._left_of_rows[table, shard] = kept
        left = torch.empty(values.shape, dtype=values.dtype)
        kept.read(keys, left)
        left.add_(values.detach())
        made = _sent(self._rows, left, None)
        kept.load({KEYS: keys, VALUES: left})
        return made

    def _slot(self, table: int, shard: int) -> Slot:
        held = self._job.tables[table]
        first = next((x for x in dense_ranges(self._job) if (x.table, x.shard) == (table, shard)), None)
        if not isinstance(held, DenseTable) or first is None or len(held.shape) < 2:
            return Slot()
        width = math.prod(held.shape[1:])
        return Slot(width, first.start % width)


def _sent(codec: Codec, left: Tensor, slot: Slot | None) -> tuple[Tensor, ...]:
    """Return what is sent of what there is to say, and take it off that."""
    made = codec.encode(left, slot)
    codec.take_off(left, made)
    # A gradient that overflowed has been sent, and would be in all that follow.
    if not math.isfinite(float(left.sum())):
        left.nan_to_num_(0.0, 0.0, 0.0)
    return made
