"""Having what was written outlive a loss of power: threads that ask for it at the same time share one `fdatasync`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Settling:
    """Of one file that only grows.

    Args:
        file: its descriptor.
        size: returns how many bytes were written so far.
    """

    def __init__(self, file: int, size: Callable[[], int]) -> None:
        self._file, self._size = file, size
        self._changed = threading.Condition()
        self._kept = 0
        self._busy = False
        self._failed: OSError | None = None

    def settle(self) -> None:
        """Return once all that was written before is on the disk. Any thread.

        Raises:
            OSError: the disk failed.
        """
        wanted = self._size()
        while self._kept < wanted:
            with self._changed:
                if self._failed is not None:  # the system tells it once, and then takes for kept what is lost
                    raise self._failed
                if self._busy:
                    self._changed.wait()
                    continue
                self._busy = True
            reached = self._kept
            try:
                now = self._size()
                os.fdatasync(self._file)
                reached = now
            except OSError as error:
                self._failed = error
                raise
            finally:
                with self._changed:
                    self._kept, self._busy = reached, False
                    self._changed.notify_all()
