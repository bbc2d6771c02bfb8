"""The implementation in numpy. See `implementation.Implementation`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from paceline.exchange.table.implementation import DenseUpdate, Rows, SharedUpdate
from paceline.exchange.table.initial import Beginning
from paceline.exchange.table.portable import route as routing
from paceline.exchange.table.portable import several, shared
from paceline.exchange.table.portable.dense import update_dense
from paceline.exchange.table.portable.rows import PortableRows
from paceline.exchange.table.rules import UpdateRule


class Portable:
    """Tables in numpy."""

    find_shared = staticmethod(shared.find)
    route = staticmethod(routing.route)
    stray = staticmethod(routing.stray)
    stray_of_several = staticmethod(several.stray)
    update_several = staticmethod(several.update)
    read_several = staticmethod(several.read)
    unique = staticmethod(routing.unique)
    sum_rows = staticmethod(routing.sum_rows)

    def dense(self, rule: UpdateRule, dtype: np.dtype[Any]) -> DenseUpdate:
        """See `Implementation`."""
        return partial(update_dense, rule)

    def shared(self, rule: UpdateRule, dtype: np.dtype[Any]) -> SharedUpdate:
        """See `Implementation`."""
        return partial(shared.update, rule)

    def rows(self, width: int, dtype: np.dtype[Any], rule: UpdateRule, beginning: Beginning) -> Rows:
        """See `Implementation`."""
        return PortableRows(width, dtype, rule, beginning)
