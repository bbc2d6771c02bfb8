"""What outlives a loss of power: names of files as well as what is in them."""

from __future__ import annotations

import os
from pathlib import Path


def settle(path: Path) -> None:
    """Have the names in a directory, or the content of a file, outlive a loss of power.

    Raises:
        OSError: it is not there, or the disk failed: what was written since the last time may be lost.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
