"""From which positions a gradient was computed: what a push says of its age."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass
class _Read:
    positions: dict[int, int]
    pushed: bool = False


class ReadPositions:
    """The oldest position of each shard that the next push rests on.

    What was read since the push before counts, all of it: the gradients of several tasks may be in one push. So does
    the last read of a table that is pushed to without: who pulls once for many tasks pushes older gradients each time.
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

    def forget(self) -> None:
        """What was read goes into no push."""
        self._reads.clear()

    def pushed(self, tables: Collection[int], shards: int) -> list[int]:
        """Return the position of each shard for a push to tables, now made; -1 where nothing of it was read."""
        oldest: dict[int, int] = {}
        for table, held in self._reads.items():
            if held.pushed and table not in tables:
                continue
            held.pushed = True
            for shard, position in held.positions.items():
                oldest[shard] = min(position, oldest.get(shard, position))
        return [oldest.get(shard, -1) for shard in range(shards)]
