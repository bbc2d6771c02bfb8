"""The native part of this room, from `native/`.

    python -m paceline.exchange.table

builds it ahead of time. Without a compiler there is none, and tables are updated by numpy.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Final

from paceline.native import BuildError, Extension

__all__ = ["BuildError", "native"]

_EXTENSION: Final = Extension(
    name="paceline_table",
    sources=Path(__file__).parent / "native",
    units=("module.cpp",),
    what="the tables of parameter servers",
    takes="about half a minute",
    # No fused multiply-adds: results are those of numpy, and of every other machine. That errors of arithmetic are not
    # looked for changes no result, and lets roots be taken of several elements at once.
    flags=("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def native() -> ModuleType:
    """Return the native module; the first process on a machine builds it, others wait for that.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    return _EXTENSION.load()
