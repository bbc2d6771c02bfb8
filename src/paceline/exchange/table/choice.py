"""Which implementation this process has: native code where there is a compiler, else numpy."""

from __future__ import annotations

import os
import warnings
from enum import Enum
from functools import cache
from typing import Final

from paceline.errors import ExchangeError, nearest
from paceline.exchange.table.build import BuildError, native
from paceline.exchange.table.compiled import Compiled
from paceline.exchange.table.implementation import Implementation
from paceline.exchange.table.portable.tables import Portable

CHOICE: Final = "PACELINE_TABLE"
"""Environment variable: `native` or `portable` allow one implementation only."""


class Choice(Enum):
    """Implementations."""

    NATIVE = "native"
    PORTABLE = "portable"

    def make(self) -> Implementation:
        """Return it.

        Raises:
            BuildError: it is native, and cannot be built.
        """
        return Compiled(native()) if self is Choice.NATIVE else Portable()


@cache
def chosen() -> Implementation:
    """Return what computes in this process.

    Raises:
        ExchangeError: the environment asks for what is not there.
    """
    choice = os.environ.get(CHOICE, "")
    known = [one.value for one in Choice]
    if choice and choice not in known:
        raise ExchangeError(f"{CHOICE} is '{choice}'; it is {', '.join(known)}, or not set.{nearest(choice, known)}")
    try:
        return Choice(choice or Choice.NATIVE.value).make()
    except BuildError as error:
        if choice:
            raise ExchangeError(f"{CHOICE} is {choice}, and the native part cannot be built here: {error}.") from error
        warnings.warn(f"tables of servers are updated by numpy, slower than they could be: {error}", stacklevel=2)
        return Portable()
