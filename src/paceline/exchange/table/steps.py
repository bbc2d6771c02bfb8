"""Numbers that depend on how often a row was updated, as far as any row got."""

from __future__ import annotations

import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.exchange.table.rules import UpdateRule

_FIRST: Final = 1024


class Steps:
    """The tables of a rule, long enough for the next update. Their numbers do not depend on how long they are."""

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule
        self._most = 0
        self._reach = 0
        self.tables: tuple[NDArray[np.float64], ...] = ()
        self._grow()

    def advance(self) -> bool:
        """Be ready for one step more; returns whether `tables` are new."""
        self._most += 1
        return self._most > self._reach and self._grow()

    def forget(self) -> None:
        """All rows begin again."""
        self._most = 0

    def most_is(self, *rows: Tensor) -> bool:
        """Take from the state of rows how far they are; returns whether `tables` are new."""
        if not self.tables:
            return False
        self._most = max([self._most, *(int(steps.max()) for steps in rows if steps.numel())])
        return self._most > self._reach and self._grow()

    def _grow(self) -> bool:
        before = [len(table) for table in self.tables]
        self._reach = max(_FIRST, 2 * self._most)
        self.tables = self._rule.tables(self._reach)
        if all(len(table) <= self._reach for table in self.tables):
            self._reach = sys.maxsize  # they stay the same from here on
        return before != [len(table) for table in self.tables]
