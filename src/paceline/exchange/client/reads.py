"""From which positions a gradient was computed: what a push says of its age."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass
class _Read:
    positions: dict[int, int]
    pushed: bool = False


class ReadPositions:
    """The oldest position of each shard that the next push rests on.

    A table counts as read where it was last read, until it is read again: who pulls once for many tasks pushes older
    gradients each time. Reads of a table between two pushes all count: the gradients of several tasks may be in one.
    """

    def __init__(self) -> None:
        self._reads: dict[int, _Read] = {}

    def read(self, tables: Iterable[int], positions: Mapping[int, int]) -> None:
        """Tables were read at these positions, by shard."""
        for table in tables:
            held = self._reads.get(table)
            if held is None or held.pushed:
                self._reads[table] = _Read(dict(positions))
                continue
            for shard, position in positions.items():
                held.positions[shard] = min(position, held.positions.get(shard, position))

    def pushed(self, shards: int) -> list[int]:
        """Return the position of each shard for a push, which is now made; -1 where nothing of it was read."""
        oldest: dict[int, int] = {}
        for held in self._reads.values():
            held.pushed = True
            for shard, position in held.positions.items():
                oldest[shard] = min(position, oldest.get(shard, position))
        return [oldest.get(shard, -1) for shard in range(shards)]
