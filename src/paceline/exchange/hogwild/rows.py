"""Rows by key in memory that several processes write to. Found and updated without locks; making one takes a lock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.exchange.hogwild.layout import columns
from paceline.exchange.hogwild.memory import Memory
from paceline.exchange.job import SparseTable
from paceline.exchange.layout import mixed
from paceline.exchange.table.choice import chosen
from paceline.exchange.table.implementation import Implementation
from paceline.exchange.table.initial import Beginning
from paceline.exchange.table.portable import shared
from paceline.exchange.table.rates import AtRate
from paceline.exchange.table.rules import Array, rule_of
from paceline.exchange.table.steps import Steps


class SharedRows:
    """A sparse table in shared memory.

    Who finds a row sees all of it: a row is written first, then its key, and its place in the index last.

    Args:
        memory: where it is.
        table: its index.
        implementation: what computes; by default what there is.
    """

    def __init__(self, memory: Memory, table: int, implementation: Implementation | None = None) -> None:
        kept = memory.job.tables[table]
        assert isinstance(kept, SparseTable)
        self._memory = memory
        self._table = table
        self._width = kept.width
        self._rule = rule_of(kept.rule)
        self._steps = Steps(self._rule)
        self._implementation = computing = implementation or chosen()
        self._update = AtRate(self._rule, lambda rule: computing.shared(rule, np.dtype(kept.dtype)))
        self._beginning = Beginning.of(kept.initializer, memory.job.seed)
        self._index: NDArray[np.int32] = memory.array(f"{table}.index")
        self._keys: NDArray[np.int64] = memory.array(f"{table}.keys")
        self._columns: list[Array] = [memory.array(f"{table}.{name}") for name in columns(kept)]

    def __len__(self) -> int:
        return self._memory.made(self._table)

    def read(self, keys: NDArray[np.int64], out: Array) -> None:
        """Read rows into `out`; those that nobody updated have the values that they begin with. keys: [n]"""
        rows = self._find(keys)
        there = rows >= 0
        if there.all():
            np.take(self._columns[0], rows, axis=0, out=out)
            return
        out[there] = self._columns[0][rows[there]]
        out[~there] = self._beginning.values(keys[~there], self._width, out.dtype)

    def update(self, keys: NDArray[np.int64], gradients: Array, factor: float = 1.0) -> None:
        """Apply gradients of rows, which are made where there are none. keys: [n], each once; gradients: [n, width].

        What others do to a row while it is updated here is lost. The learning rate is `factor` times that of the rule.

        Raises:
            ExchangeError: there is no room for more rows.
        """
        rows = self._find(keys)
        if (rows < 0).any():
            self._make(keys[rows < 0])
            rows = self._find(keys)
        columns = self._columns
        self._steps.most_is(*(torch.from_numpy(steps[rows] + 1) for steps in columns[1 + len(self._rule.elements) :]))
        self._update(factor)(rows, gradients, columns, self._steps.tables)

    def put(self, keys: NDArray[np.int64], kept: Sequence[Array]) -> None:
        """Write whole rows: what is kept of each, in the order of `all`. keys: [n], each once.

        Raises:
            ExchangeError: there is no room for more rows.
        """
        self._make(keys[self._find(keys) < 0])
        rows = self._find(keys)
        for column, given in zip(self._columns, kept, strict=True):
            column[rows] = given

    def all(self) -> tuple[NDArray[np.int64], list[Array]]:
        """Return copies of all keys, in the order in which they were made, and of what is kept of each row."""
        count = len(self)
        return self._keys[:count].copy(), [column[:count].copy() for column in self._columns]

    def _find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each key, -1 where there is none.

        Rows beyond those that are made are being made, or whoever made them was killed: others get their numbers.
        """
        keys, made, rows = np.ascontiguousarray(keys), len(self), np.empty(len(keys), dtype=np.int64)
        self._implementation.find_shared(self._index, self._keys, keys, rows)
        unmade = rows >= made
        if unmade.any():
            others = np.empty(int(unmade.sum()), dtype=np.int64)
            shared.find(self._index, self._keys[:made], keys[unmade], others)
            rows[unmade] = others
        return rows

    def _make(self, keys: NDArray[np.int64]) -> None:
        with self._memory.alone():
            keys = keys[self._find(keys) < 0]  # somebody may have made them meanwhile
            count = len(self)
            self._memory.reserve(self._table, count + len(keys))
            rows = np.arange(count, count + len(keys))
            values, *state = (column[count : count + len(keys)] for column in self._columns)
            values[:] = self._beginning.values(keys, self._width, values.dtype)
            elements = len(self._rule.elements)
            self._rule.start(values, state[:elements], state[elements:])
            self._keys[rows] = keys
            self._place(keys, rows)
            self._memory.set_made(self._table, count + len(keys))  # last: who is killed before has made nothing

    def _place(self, keys: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        mask = len(self._index) - 1
        waiting, slots = np.arange(len(keys)), self._homes(keys)
        while waiting.size:
            free = self._index[slots] == 0
            self._index[slots[free]] = rows[waiting[free]] + 1  # of several for one slot, the last one has it
            got = free & (self._index[slots] == rows[waiting] + 1)
            waiting, slots = waiting[~got], (slots[~got] + 1) & mask

    def _homes(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        homes: NDArray[np.int64] = (mixed(keys) & np.uint64(len(self._index) - 1)).view(np.int64)
        return homes
