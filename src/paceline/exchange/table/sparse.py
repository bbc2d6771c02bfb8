"""Rows by 64-bit keys, with what their rule keeps: a part of a sparse table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.job import Initializer, Rule
from paceline.exchange.table.choice import chosen
from paceline.exchange.table.implementation import Implementation, Rows
from paceline.exchange.table.initial import Beginning
from paceline.exchange.table.rates import AtRate
from paceline.exchange.table.rules import rule_of
from paceline.exchange.table.steps import Steps

KEYS, VALUES = "keys", "values"
_DTYPES: Final[Mapping[torch.dtype, np.dtype[Any]]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


class Sparse:
    """Rows in slabs, found by a hash table.

    A row is made when it is first updated. Until then its values are a function of (seed, key), and reading it makes
    nothing: reads happen on one replica only, and all must stay the same. Rows are kept in the order in which they were
    made, and never go. A key that comes twice in a call counts twice, one after the other.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        rule: Rule,
        initializer: Initializer,
        seed: int,
        implementation: Implementation | None = None,
    ) -> None:
        """Begin without rows.

        Raises:
            ExchangeError: width, type, rule or initializer cannot be.
        """
        if dtype not in _DTYPES:
            raise ExchangeError(f"a sparse table is of {dtype}; it is one of {', '.join(map(str, _DTYPES))}.")
        if width < 1:
            raise ExchangeError(f"rows of a sparse table are {width} wide; it is a whole number from 1.")
        self.width: Final = width
        self.dtype: Final = dtype
        self._rule = rule_of(rule)
        self._steps = Steps(self._rule)
        beginning = Beginning.of(initializer, seed)
        self._implementation = implementation or chosen()
        self._rows = self._implementation.rows(width, _DTYPES[dtype], self._rule, beginning)
        self._rows.set_tables(self._steps.tables)
        self._set_rate = AtRate(self._rule, self._rows.set_rule)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def memory_bytes(self) -> int:
        """What it takes."""
        return self._rows.memory_bytes

    def read(self, keys: Tensor, out: Tensor) -> int:
        """Read rows into `out`; returns how many of them have not been made. keys: [n], out: [n, width]."""
        if out.dtype != self.dtype or not out.is_contiguous():
            rows = torch.empty(out.shape, dtype=self.dtype)
            new = self.read(keys, rows)
            out.copy_(rows)
            return new
        self._check(keys, out)
        return self._rows.read(_keys(keys), out.numpy())

    def update(self, keys: Tensor, gradients: Tensor, factor: float = 1.0) -> None:
        """Apply gradients of rows, at `factor` times the rule's learning rate; new rows are made.

        keys: [n], gradients: [n, width].
        """
        self._check(keys, gradients)
        self._advanced(factor).update(_keys(keys), self._typed(gradients))

    @classmethod
    def update_several(
        cls, tables: Sequence[Self], bounds: Sequence[int], keys: Tensor, gradients: Tensor, factor: float = 1.0
    ) -> None:
        """Do as `update` for several tables of one kind, in one call.

        Args:
            tables: one at least; one may come twice.
            bounds: keys of table i are from `bounds[i]` to `bounds[i + 1]`; [tables + 1], rising.
            keys: of all of them. [n]
            gradients: the same. [n, width]
            factor: of the rule's learning rate.
        """
        first = tables[0]
        first._check(keys, gradients)
        rows = [table._advanced(factor) for table in tables]
        first._implementation.update_several(rows, bounds, _keys(keys), first._typed(gradients))

    @classmethod
    def read_several(cls, tables: Sequence[Self], bounds: Sequence[int], keys: Tensor, out: Tensor) -> None:
        """Do as `read` for several tables of one kind, in one call; see `update_several`. out: contiguous."""
        first = tables[0]
        first._check(keys, out)
        first._implementation.read_several([table._rows for table in tables], bounds, _keys(keys), out.numpy())

    def add(self, keys: Tensor, differences: Tensor) -> None:
        """Add to values as they are; new rows are made, state stays. keys: [n], differences: [n, width].

        Raises:
            ExchangeError: under FTRL, where values follow from the state.
        """
        self._rule.check_can_add()
        self._check(keys, differences)
        self._rows.add(_keys(keys), self._typed(differences))

    def touched(self) -> int:
        """Return how many rows were changed since `clear_touched`, or ever; loaded ones count."""
        return self._rows.count(True)

    def clear_touched(self) -> None:
        """Note from here on which rows are changed."""
        self._rows.clear_touched()

    def state(self, since_marks: bool = False) -> dict[str, Tensor]:
        """Return a copy of all rows, or of those touched, in the order in which they were made.

        Returns:
            `keys` [n] int64, `values` [n, width], and the rule's state by name: [n, width] or [n].
        """
        count = self._rows.count(since_marks)
        keys = torch.empty(count, dtype=torch.int64)
        columns = {name: torch.empty(count, width, dtype=self.dtype) for name, width in self._columns.items()}
        self._rows.copy(since_marks, keys.numpy(), [column.numpy() for column in columns.values()])
        flat = {name: column[:, 0] if name in self._rule.rows else column for name, column in columns.items()}
        return {KEYS: keys, **flat}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take rows of a state: of all, or of a later one that has those touched since. Rows not in it stay.

        Raises:
            ExchangeError: it is not of this kind.
        """
        missing = [name for name in (KEYS, *self._columns) if name not in state]
        if missing:
            raise ExchangeError(f"the state of a sparse table lacks '{missing[0]}'; it is of another job.")
        keys = state[KEYS]
        columns = []
        for name, width in self._columns.items():
            column = state[name] if state[name].ndim == 2 else state[name][:, None]
            if column.shape != (len(keys), width) or column.dtype != self.dtype:
                raise ExchangeError(
                    f"the state of a sparse table has {column.dtype} of {tuple(column.shape)} for '{name}', and "
                    f"{self.dtype} of {(len(keys), width)} is needed; it is of another job."
                )
            columns.append(column.contiguous().numpy())
        self._rows.put(_keys(keys), columns)
        if self._steps.most_is(*(state[name] for name in self._rule.rows)):
            self._rows.set_tables(self._steps.tables)

    @property
    def _columns(self) -> dict[str, int]:
        """What is kept for a row, and how many numbers each is."""
        return dict.fromkeys((VALUES, *self._rule.elements), self.width) | dict.fromkeys(self._rule.rows, 1)

    def _advanced(self, factor: float) -> Rows:
        """Return the rows, ready for one update more."""
        if self._steps.advance():
            self._rows.set_tables(self._steps.tables)
        self._set_rate(factor)
        return self._rows

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if keys.dtype != torch.int64 or keys.ndim != 1:
            raise ExchangeError(f"keys are {keys.dtype} of {tuple(keys.shape)}; they are torch.int64 of (n,).")
        if values.shape != (keys.shape[0], self.width):
            raise ExchangeError(
                f"{len(keys)} keys of a sparse table came with values of {tuple(values.shape)}; "
                f"they are of {(len(keys), self.width)}."
            )

    def _typed(self, values: Tensor) -> NDArray[np.floating]:
        if values.dtype is not self.dtype or values.requires_grad or not values.is_contiguous():
            values = values.detach().to(self.dtype).contiguous()
        array: NDArray[np.floating] = values.numpy()
        return array


def _keys(keys: Tensor) -> NDArray[np.int64]:
    array: NDArray[np.int64] = (keys if keys.is_contiguous() else keys.contiguous()).numpy()
    return array
