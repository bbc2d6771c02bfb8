"""Steps of a run, from the tasks that workers say they did: a step is there once all of its tasks are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.train.callbacks import StepReport


@dataclass
class _Clock:
    """Tasks of a clock so far: their losses and weights; and the norm of the gradient, once somebody says it."""

    tasks: dict[int, tuple[float, float]] = field(default_factory=dict)
    norm: float | None = None


class Steps:
    """Puts tasks together to steps, in order.

    Args:
        pieces: tasks of a clock.
        steps: of the run.
        every: steps of a clock; above 1 where workers take local steps.
        rates: learning rate of each step.
        samples: returns how many samples a step has; steps are counted from 0.
        first: clocks that were done before.
        normed: whether the norms that workers name are those of steps, and not of the parts of a group.
    """

    def __init__(
        self,
        pieces: int,
        steps: int,
        every: int,
        rates: Sequence[float],
        samples: Callable[[int], int],
        first: int = 0,
        normed: bool = True,
    ) -> None:
        self._pieces, self._steps, self._every, self._rates = pieces, steps, every, rates
        self._samples, self._normed = samples, normed
        self._next = first
        self._open: dict[int, _Clock] = {}
        self._at = time.monotonic()
        self._peak = 0

    @property
    def done(self) -> int:
        """Steps that are there."""
        return self._next * self._every

    def take(self, records: Iterable[Mapping[str, Any]]) -> list[StepReport]:
        """Take tasks that became known at once; return the steps that they complete. A task counts once.

        Such steps took equal parts of the time since those before, as no more is known of when each was done.
        """
        done = [report for record in records for report in self._take(record)]
        if not done:
            return []
        now, before = time.monotonic(), self._at
        self._at = now
        return [replace(report, seconds=(now - before) / len(done)) for report in done]

    def _take(self, record: Mapping[str, Any]) -> Iterator[StepReport]:
        task, clock = int(record["task"]), int(record["task"]) // self._pieces
        self._peak = max(self._peak, int(record.get("memory_bytes") or 0))
        if clock < self._next:
            return
        loss = math.nan if record["loss"] is None else float(record["loss"])
        begun = self._open.setdefault(clock, _Clock())
        begun.tasks.setdefault(task, (loss, float(record["weight"])))
        if self._normed and record.get("norm") is not None:
            begun.norm = float(record["norm"])
        while self._next in self._open and len(self._open[self._next].tasks) == self._pieces:
            yield self._completed()

    def _completed(self) -> StepReport:
        done = self._open.pop(self._next)
        tasks = [pair for _, pair in sorted(done.tasks.items()) if pair[1]]
        samples = sum(map(self._samples, range(self.done, self.done + self._every)))
        self._next += 1
        weight = sum(pair[1] for pair in tasks)
        loss = math.fsum(loss * count for loss, count in tasks) / weight if weight else math.nan
        unit: Literal["tokens", "samples"] = "samples" if weight == samples else "tokens"
        rate = self._rates[self.done - 1]
        return StepReport(self.done, self._steps, loss, rate, done.norm, weight, 0.0, self._peak, unit=unit)
