"""Which rows of a table tasks have changed lately, for who carries them elsewhere. May name too many, never too few."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import torch
from torch import Tensor

_LEAST: Final = 1 << 16
"""Keys that are kept however few rows there are."""


class _Change(NamedTuple):
    position: int
    worker: int
    keys: Tensor


class Changes:
    """The keys of one table in one shard.

    Memory is bounded by the number of rows: what happened long ago is forgotten, and who asks for it is told so.
    """

    def __init__(self, position: int = 0) -> None:
        """Begin to note. position: of the shard; what was before it is not known."""
        self._changes: deque[_Change] = deque()
        self._known_from = position
        self._count = 0

    def note(self, position: int, worker: int, keys: Tensor, rows: int) -> None:
        """Note what an update has changed.

        Args:
            position: of the shard, with it.
            worker: whose update it was.
            keys: [n] int64; kept, and not to be changed any more.
            rows: in the table.
        """
        self._changes.append(_Change(position, worker, keys))
        self._count += len(keys)
        while self._count > max(_LEAST, 2 * rows):
            oldest = self._changes.popleft()
            self._known_from = oldest.position
            self._count -= len(oldest.keys)

    def since(self, position: int, other_than: int) -> Tensor | None:
        """Return keys that were changed after a position, each once; None: that was too long ago.

        Args:
            position: of the shard.
            other_than: a worker whose own updates are left out.
        """
        if position < self._known_from:
            return None
        found = [torch.empty(0, dtype=torch.int64)]
        for change in reversed(self._changes):
            if change.position <= position:
                break
            if change.worker != other_than:
                found.append(change.keys)
        each: Tensor = torch.unique(torch.cat(found))
        return each
