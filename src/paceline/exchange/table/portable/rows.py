"""Rows by key, with what their rule keeps, in numpy: what `native/rows.hpp` is in C++, call by call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.exchange.table.initial import Beginning
from paceline.exchange.table.portable.index import Index
from paceline.exchange.table.rules import UpdateRule

_Array = NDArray[Any]


class PortableRows:
    """See `implementation.Rows`."""

    def __init__(self, width: int, dtype: np.dtype[Any], rule: UpdateRule, beginning: Beginning) -> None:
        self._width, self._dtype, self._rule, self._beginning = width, dtype, rule, beginning
        self._index = Index()
        self._keys = np.empty(0, dtype=np.int64)
        self._touched = np.empty(0, dtype=np.bool_)
        self._columns = [np.empty((0, columns), dtype=dtype) for columns in self._widths]
        self._tables: tuple[_Array, ...] = ()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def memory_bytes(self) -> int:
        """What it takes."""
        return self._index.memory_bytes + sum(x.nbytes for x in (self._keys, self._touched, *self._columns))

    def set_rule(self, rule: UpdateRule) -> None:
        """See `implementation.Rows`."""
        self._rule = rule

    def set_tables(self, tables: Sequence[_Array]) -> None:
        """Take numbers by step."""
        self._tables = tuple(tables)

    def read(self, keys: NDArray[np.int64], out: _Array) -> int:
        """See `implementation.Rows`."""
        rows = self._index.find(keys)
        there = rows >= 0
        out[there] = self._columns[0][rows[there]]
        new = keys[~there]
        out[~there] = self._beginning.values(new, self._width, self._dtype)
        return len(new)

    def update(self, keys: NDArray[np.int64], gradients: _Array) -> None:
        """See `implementation.Rows`."""
        elements = len(self._rule.elements)
        for chosen in _rounds(keys):
            rows, gradient = self._rows_of(keys[chosen]), gradients[chosen]
            values, *state = (column[rows] for column in self._columns)
            self._rule.advance(gradient, state[elements:])
            self._rule.move(values, gradient, state[:elements], state[elements:], self._tables)
            self._write(rows, (values, *state))

    def add(self, keys: NDArray[np.int64], differences: _Array) -> None:
        """See `implementation.Rows`."""
        for chosen in _rounds(keys):
            rows = self._rows_of(keys[chosen])
            self._columns[0][rows] += differences[chosen]
            self._touched[rows] = True

    def put(self, keys: NDArray[np.int64], columns: Sequence[_Array]) -> None:
        """See `implementation.Rows`."""
        for chosen in _rounds(keys):
            rows = self._rows_of(keys[chosen])
            self._write(rows, [column[chosen] for column in columns])

    def count(self, touched: bool) -> int:
        """See `implementation.Rows`."""
        return int(np.count_nonzero(self._touched[: len(self)])) if touched else len(self)

    def copy(self, touched: bool, keys: NDArray[np.int64], columns: Sequence[_Array]) -> None:
        """See `implementation.Rows`."""
        rows = np.flatnonzero(self._touched[: len(self)]) if touched else slice(len(self))
        keys[:] = self._keys[rows]
        for out, column in zip(columns, self._columns, strict=True):
            out[:] = column[rows]

    def clear_touched(self) -> None:
        """See `implementation.Rows`."""
        self._touched[:] = False

    @property
    def _widths(self) -> list[int]:
        return [self._width] * (1 + len(self._rule.elements)) + [1] * len(self._rule.rows)

    def _rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of keys, each given once; those that have none get one, with the values it begins with."""
        rows = self._index.find(keys)
        new = keys[rows < 0]
        if len(new):
            added = self._index.add(new)
            rows[rows < 0] = added
            self._reserve(len(self._index))
            self._keys[added] = new
            values = self._beginning.values(new, self._width, self._dtype)
            state = [np.empty((len(new), columns), dtype=self._dtype) for columns in self._widths[1:]]
            elements = len(self._rule.elements)
            self._rule.start(values, state[:elements], state[elements:])
            self._write(added, (values, *state))
        return rows

    def _write(self, rows: NDArray[np.int64], columns: Sequence[_Array]) -> None:
        for column, values in zip(self._columns, columns, strict=True):
            column[rows] = values
        self._touched[rows] = True

    def _reserve(self, count: int) -> None:
        if count <= len(self._keys):
            return
        size = max(count, 2 * len(self._keys))
        self._keys, self._touched = _grown(self._keys, size), _grown(self._touched, size)
        self._columns = [_grown(column, size) for column in self._columns]


def _grown(array: _Array, size: int) -> _Array:
    larger = np.zeros((size, *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger


def _rounds(keys: NDArray[np.int64]) -> list[Any]:
    """Return what selects all keys, each once in a round: a key that comes n times is in n rounds."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.ones(len(keys), dtype=np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    if first.all():
        return [slice(None)] if len(keys) else []
    starts = np.flatnonzero(first)
    rank = np.empty(len(keys), dtype=np.int64)
    rank[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(np.append(starts, len(keys))))
    return [np.flatnonzero(rank == turn) for turn in range(int(rank.max()) + 1)]
