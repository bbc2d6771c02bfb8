"""The implementation in native code. See `implementation.Implementation`."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, Final

import numpy as np

from paceline.exchange.table.implementation import DenseUpdate, Rows, SharedUpdate
from paceline.exchange.table.initial import Beginning
from paceline.exchange.table.rules import UpdateRule

_ROWS: Final = {np.dtype(np.float32): "RowsFloat32", np.dtype(np.float64): "RowsFloat64"}


class Compiled:
    """Tables in native code."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.route = module.route
        self.find_shared = module.find_shared
        self.stray = module.stray
        self.stray_of_several = module.stray_of_several
        self.update_several = module.update_several
        self.read_several = module.read_several
        self.unique = module.unique
        self.sum_rows = module.sum_rows

    def dense(self, rule: UpdateRule, dtype: np.dtype[Any]) -> DenseUpdate:
        """See `Implementation`."""
        return partial(self._module.update_dense, rule.name, rule.constants())

    def shared(self, rule: UpdateRule, dtype: np.dtype[Any]) -> SharedUpdate:
        """See `Implementation`."""
        return partial(self._module.update_shared, rule.name, rule.constants())

    def rows(self, width: int, dtype: np.dtype[Any], rule: UpdateRule, beginning: Beginning) -> Rows:
        """See `Implementation`."""
        drawn = (int(beginning.distribution), beginning.scale, beginning.salt)
        rows: Rows = getattr(self._module, _ROWS[dtype])(width, rule.name, rule.constants(), *drawn)
        return rows
