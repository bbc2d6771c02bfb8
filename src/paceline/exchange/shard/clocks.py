"""Which tasks were applied to a shard, and what may therefore be read: clocks and their bounds.

Where steps are closed (`norms`), a clock counts as completed once its step is closed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

from paceline.exchange.job import Job

_NAMED: Final = 16
"""Missing tasks that are named; whoever waits for more hears of the others later."""


class Clocks:
    """The tasks that were applied: all below a floor, and some above it.

    Args:
        job: for its pieces and the bounds of its tables.
    """

    def __init__(self, job: Job) -> None:
        self._pieces = job.pieces
        bounds = (table.consistency.bound for table in job.tables)
        self._kept = 1 + max((bound for bound in bounds if bound is not None), default=0)
        self._floor = 0
        self._above: set[int] = set()
        self._closed: tuple[int, float] | None = (0, math.nan) if job.closes_steps else None  # clocks; norm of the last
        self._reached: deque[tuple[int, int]] = deque([(0, 0)], self._kept)  # clock, and the position it came with

    @property
    def completed(self) -> int:
        """The clock all tasks of clocks below which were applied."""
        return self.gathered if self._closed is None else self._closed[0]

    @property
    def gathered(self) -> int:
        """The clock all tasks of clocks below which are here."""
        return self._floor // self._pieces

    @property
    def last_norm(self) -> float:
        """Of the step that was closed last; NaN: none was."""
        return math.nan if self._closed is None else self._closed[1]

    def close(self, norm: float, position: int) -> None:
        """Note the lowest clock that is not completed as that, by the update that the shard counts as `position`."""
        self._closed = self.completed + 1, norm
        self._reached.append((self.completed, position))

    def holds(self, task: int) -> bool:
        """Whether a task was applied."""
        return 0 <= task < self._floor or task in self._above

    def holds_all(self, tasks: Iterable[int]) -> bool:
        """Whether all of some tasks were applied."""
        return all(map(self.holds, tasks))

    def holds_any(self, tasks: Iterable[int]) -> bool:
        """Whether one of some tasks was applied."""
        return any(map(self.holds, tasks))

    def add(self, tasks: Iterable[int], position: int) -> None:
        """Note tasks as applied, by the update that the shard counts as `position`."""
        before, floor, above = self.completed, self._floor, self._above
        for task in tasks:
            if task == floor:
                floor += 1
            else:
                above.add(task)
        while above and floor in above:
            above.remove(floor)
            floor += 1
        self._floor = floor
        completed = self.completed
        for clock in range(max(before, completed - self._kept) + 1, completed + 1):
            self._reached.append((clock, position))

    def missing(self, clock: int) -> tuple[int, ...]:
        """Return tasks of clocks below `clock` that were not applied: the lowest ones.

        Where all are here and their step is not closed, those of that step: the worker of one of them closes it.
        """
        found: list[int] = []
        for task in range(self._floor, max(0, clock) * self._pieces):
            if len(found) == _NAMED:
                break
            if task not in self._above:
                found.append(task)
        if not found and self.completed < clock:
            first = self.completed * self._pieces
            return tuple(range(first, first + min(_NAMED, self._pieces)))
        return tuple(found)

    def reached(self, clock: int) -> int:
        """Return the position at which all tasks of clocks below `clock` had been applied, first.

        0 for clocks that are further back than any bound reaches.
        """
        return next((position for known, position in self._reached if known == clock), 0)

    def state(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        kept = {"floor": self._floor, "above": sorted(self._above), "reached": list(map(list, self._reached))}
        if self._closed is None:
            return kept
        clock, norm = self._closed
        return {**kept, "closed": clock, "norm": None if math.isnan(norm) else norm}

    @classmethod
    def of(cls, job: Job, state: Mapping[str, Any]) -> Self:
        """Read what `state` wrote."""
        made = cls(job)
        made._floor = state["floor"]
        made._above = set(state["above"])
        if made._closed is not None:
            norm = state.get("norm")
            made._closed = state.get("closed", made.gathered), math.nan if norm is None else norm
        made._reached.clear()
        made._reached.extend((clock, position) for clock, position in state["reached"])
        return made
