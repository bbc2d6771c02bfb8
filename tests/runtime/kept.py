"""Programs kept from test to test of a process: what one has captured and placed, the next reads.

Only for modules whose ranks share the process: between processes links are measured for a cache, and plans follow them.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def kept_programs() -> Iterator[None]:
    """Modules that are parallelized inside read and leave programs in a directory of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", _directory().name)
        yield


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kept-programs-")
