"""What an implementation of tables is; `choice.py` has those that there are. All give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.exchange.table.initial import Beginning
from paceline.exchange.table.rules import UpdateRule

_Array: TypeAlias = NDArray[Any]
DenseUpdate: TypeAlias = Callable[[_Array, _Array, Sequence[_Array], Sequence[_Array], Sequence[_Array]], None]
"""Updates values and state in place: (values [n], gradient [n], element state [n], row state [1], tables by step)."""

SharedUpdate: TypeAlias = Callable[[NDArray[np.int64], _Array, Sequence[_Array], Sequence[_Array]], None]
"""Updates rows in place: (their numbers [n], each once, gradients [n, width], columns [all, ...], tables by step)."""


class Rows(Protocol):
    """Rows by key. Arrays are contiguous and of the table's type.

    What is kept for a row is *columns*: values, element state, row state.
    """

    def __len__(self) -> int: ...

    @property
    def memory_bytes(self) -> int:
        """What it takes."""
        ...

    def set_rule(self, rule: UpdateRule) -> None:
        """Go on with the same rule at another learning rate."""
        ...

    def set_tables(self, tables: Sequence[_Array]) -> None:
        """Take numbers by step."""
        ...

    def read(self, keys: NDArray[np.int64], out: _Array) -> int:
        """Read values of rows; returns how many of the keys have none, and so the values that they begin with."""
        ...

    def update(self, keys: NDArray[np.int64], gradients: _Array) -> None:
        """Apply gradients."""
        ...

    def add(self, keys: NDArray[np.int64], differences: _Array) -> None:
        """Add to values."""
        ...

    def put(self, keys: NDArray[np.int64], columns: Sequence[_Array]) -> None:
        """Write whole rows."""
        ...

    def count(self, touched: bool) -> int:
        """Return the number of rows, or of those touched."""
        ...

    def copy(self, touched: bool, keys: NDArray[np.int64], columns: Sequence[_Array]) -> None:
        """Write out all rows, or those touched, as many as `count` says."""
        ...

    def clear_touched(self) -> None:
        """Mark all rows as not touched."""
        ...


class Implementation(Protocol):
    """Makes tables, and sorts keys. Arrays are contiguous; keys are of 64 bits."""

    def dense(self, rule: UpdateRule, dtype: np.dtype[Any]) -> DenseUpdate:
        """Return what updates a dense range."""
        ...

    def rows(self, width: int, dtype: np.dtype[Any], rule: UpdateRule, beginning: Beginning) -> Rows:
        """Return an empty table of rows."""
        ...

    def shared(self, rule: UpdateRule, dtype: np.dtype[Any]) -> SharedUpdate:
        """Return what updates rows in memory that other processes write to meanwhile."""
        ...

    def find_shared(
        self,
        index: NDArray[np.int32],
        held: NDArray[np.int64],
        keys: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> None:
        """Write the row of each key in such memory, -1 where there is none.

        Args:
            index: by key, with open addressing from the lower bits of the mixed key: the row and 1, or 0.
            held: the key of each row.
            keys: to look for. [n]
            rows: where they are. [n]
        """
        ...

    def route(self, keys: NDArray[np.int64], order: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        """Write the order that sorts keys by shard, and where in it each shard begins; offsets: [shards + 1]."""
        ...

    def stray(self, keys: NDArray[np.int64], shard: int, shards: int) -> int:
        """Return the place of the first key that is of another shard; -1: all are of this one."""
        ...

    def stray_of_several(
        self, keys: NDArray[np.int64], bounds: Sequence[int], numbers: Sequence[int], shards: int
    ) -> int:
        """Return the place of the first key that is of another shard than its part; -1: there is none.

        Args:
            keys: of all parts. [n]
            bounds: keys of part i are from `bounds[i]` to `bounds[i + 1]`.
            numbers: the shard of each part.
            shards: of all.
        """
        ...

    def update_several(
        self, tables: Sequence[Rows], bounds: Sequence[int], keys: NDArray[np.int64], gradients: _Array
    ) -> None:
        """Update several tables of one width, one after the other; keys of table i are as in `stray_of_several`."""
        ...

    def read_several(self, tables: Sequence[Rows], bounds: Sequence[int], keys: NDArray[np.int64], out: _Array) -> None:
        """Read rows of several tables of one width; keys of table i are as in `stray_of_several`."""
        ...

    def unique(self, keys: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return keys once, in the order in which they came; writes the place of each given one."""
        ...

    def sum_rows(self, rows: _Array, places: NDArray[np.int64], sums: _Array) -> None:
        """Write the sum of the rows of each place, added in order; places are those that `unique` wrote."""
        ...
