"""Which pushes were applied to a shard: what comes again counts once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from paceline.exchange.updates import OUTSTANDING


class Sequences:
    """Of each worker the pushes that were applied: all up to a floor, and some above it.

    A push that was repeated by its tasks alone (somebody else had done them) leaves a gap, for it changes nothing and
    takes no position. So the floor is never further back than pushes may be outstanding.
    """

    def __init__(self) -> None:
        self._floors: dict[int, int] = {}
        self._above: dict[int, dict[int, int]] = {}  # worker -> sequence -> position

    def position(self, worker: int, sequence: int, now: int) -> int | None:
        """Return where a push was applied, `now` where that is not known any more; None: it was not."""
        if 0 < sequence <= self._floors.get(worker, 0):
            return now
        above = self._above.get(worker)
        return None if above is None else above.get(sequence)

    def add(self, worker: int, sequence: int, position: int) -> None:
        """Note a push as applied."""
        floor = self._floors.get(worker, 0)
        if sequence == floor + 1 and worker not in self._above:
            self._floors[worker] = sequence
            return
        above = self._above.pop(worker, {})
        above[sequence] = position
        oldest = max(above) - OUTSTANDING
        if oldest > floor:
            floor = oldest
            above = {known: at for known, at in above.items() if known > floor}
        while floor + 1 in above:
            floor += 1
            del above[floor]
        self._floors[worker] = floor
        if above:
            self._above[worker] = above

    def state(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "floors": sorted(self._floors.items()),
            "above": [[worker, sorted(above.items())] for worker, above in sorted(self._above.items())],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """Read what `state` wrote."""
        made = cls()
        made._floors = dict(map(tuple, state["floors"]))
        made._above = {worker: dict(map(tuple, above)) for worker, above in state["above"]}
        return made
