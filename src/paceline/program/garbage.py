"""Holding the garbage collector while thousands of objects are made that all live on."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_held() -> Iterator[None]:
    """Collect nothing meanwhile: a full pass over all that torch has imported takes longer than reading a graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
