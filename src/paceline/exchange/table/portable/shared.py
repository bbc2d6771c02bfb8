"""Rows in memory that other processes write to meanwhile, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.exchange.layout import mixed
from paceline.exchange.table.rules import UpdateRule

_Array = NDArray[Any]


def find(index: NDArray[np.int32], held: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """See `Implementation.find_shared`; slots of rows beyond `held` are passed over."""
    rows[:] = -1
    mask = len(index) - 1
    waiting = np.arange(len(keys))
    slots = (mixed(keys) & np.uint64(mask)).view(np.int64)
    while waiting.size:
        taken = index[slots].astype(np.int64)
        same = (taken > 0) & (taken <= len(held))
        same[same] = held[taken[same] - 1] == keys[waiting[same]]
        rows[waiting[same]] = taken[same] - 1
        going_on = (taken > 0) & ~same
        waiting, slots = waiting[going_on], (slots[going_on] + 1) & mask


def update(
    rule: UpdateRule,
    rows: NDArray[np.int64],
    gradients: _Array,
    columns: Sequence[_Array],
    tables: Sequence[_Array],
) -> None:
    """See `implementation.SharedUpdate`. What others do between reading here and writing is lost."""
    elements = len(rule.elements)
    values, *state = (column[rows] for column in columns)
    rule.advance(gradients, state[elements:])
    rule.move(values, gradients, state[:elements], state[elements:], tables)
    for column, changed in zip(columns, (values, *state), strict=True):
        column[rows] = changed
