"""A dense range updated in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from numpy.typing import NDArray

from paceline.exchange.table.rules import UpdateRule

_BLOCK: Final = 1 << 15
"""Elements that stay in the cache while a formula goes over them."""


def update_dense(
    rule: UpdateRule,
    values: NDArray[Any],
    gradient: NDArray[Any],
    elements: Sequence[NDArray[Any]],
    rows: Sequence[NDArray[Any]],
    tables: Sequence[NDArray[Any]],
) -> None:
    """See `implementation.DenseUpdate`."""
    row_state = [state[None] for state in rows]
    rule.advance(gradient[None], row_state)
    for start in range(0, len(values), _BLOCK):
        part = slice(start, start + _BLOCK)
        rule.move(
            values[None, part], gradient[None, part], [state[None, part] for state in elements], row_state, tables
        )
