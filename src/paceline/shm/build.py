"""The native part of this room, from `native/`.

    python -m paceline.shm

builds it ahead of time. Without a compiler there is none, and ranks exchange through `portable` instead.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Final

from paceline.native import BuildError, Extension

__all__ = ["BuildError", "native"]

_EXTENSION: Final = Extension(
    name="paceline_shm",
    sources=Path(__file__).parent / "native",
    units=("module.cpp", "core/*.cpp"),
    what="the exchange through shared memory",
    takes="about a minute",
)


def native() -> ModuleType:
    """Return the native module; the first process on a machine builds it, others wait for that.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    return _EXTENSION.load()
