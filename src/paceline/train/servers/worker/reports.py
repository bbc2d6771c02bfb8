"""What a worker tells of what it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskReport:
    """A task that was pushed.

    Attributes:
        task: its number.
        loss, weight: see `computer.Computed`.
        read_s, compute_s, push_s: where its time went, in seconds.
        alone: it was another worker's.
        memory_bytes: the most that this process had so far.
        norm: global norm, before clipping, of the gradient of its step, where this worker knows it; else None.
    """

    task: int
    loss: float
    weight: float
    read_s: float
    compute_s: float
    push_s: float
    alone: bool
    memory_bytes: int
    norm: float | None = None


@dataclass(frozen=True)
class EvaluationReport:
    """Held-out data was looked at, with all tasks of clocks below `clock` applied; see `computer.Evaluated`."""

    clock: int
    loss: float
    weight: float
    seconds: float
    metrics: Mapping[str, float]


class Listener:
    """Is told what a worker did; does nothing with it. Derive, and override what you need."""

    def on_task(self, report: TaskReport) -> None:
        """After a task was pushed."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """After an evaluation."""

    def on_wait(self) -> None:
        """There is nothing to do now."""
