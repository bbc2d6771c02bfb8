"""Verification: a plan against the unmodified module run serially, sample for sample.

Knows the program and the runtime; knows nothing of recipes or the command line. The room is also a verb of the public
interface: `paceline.verify(...)` is `paceline.verify.run.verify`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Verb(ModuleType):
    """A module that can be called: importing `paceline.verify` sets the very name that Python users call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from paceline.verify.run import verify

        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
