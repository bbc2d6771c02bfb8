"""The native part of this room, from `native/`.

    python -m paceline.exchange.wire

builds it ahead of time. Without a compiler there is none, and frames are made and read in Python.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Final

from paceline.native import BuildError, Extension

__all__ = ["BuildError", "native"]

_EXTENSION: Final = Extension(
    name="paceline_wire",
    sources=Path(__file__).parent / "native",
    units=("module.cpp",),
    what="the messages of parameter servers",
    takes="about half a minute",
)


def native() -> ModuleType:
    """Return the native module; the first process on a machine builds it, others wait for that.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    return _EXTENSION.load()
