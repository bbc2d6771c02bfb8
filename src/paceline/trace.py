"""Traces: what ranks did when, in a run or in virtual time, for Perfetto and Chrome's viewer.

The same nouns serve both, so that a simulated step can be laid beside a real one. This module knows nothing of PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

_MICRO = 1e6
FORWARD, BACKWARD, GRADIENTS, NORM, UPDATE = "forward", "backward", "gradients", "norm", "update"
"""The parts of a step; a pipeline has the actions of its schedule instead of passes, and sums its gradients after."""


class Category(StrEnum):
    """What an event is: a thread of its rank in the picture."""

    PHASE = "phase"
    """A part of a step that users know: forward, backward, an action of a pipeline, the update."""
    COMPUTE = "compute"
    NETWORK = "network"
    WAIT = "wait"
    """Waiting for what others send; nothing is computed."""


@dataclass(frozen=True)
class Event:
    """Something that took time on one rank.

    Attributes:
        name: what was done.
        category: the thread that it belongs to.
        rank: who did it.
        began_s, ended_s: seconds since the trace began.
        arguments: what else is known, as plain values.
    """

    name: str
    category: Category
    rank: int
    began_s: float
    ended_s: float
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """Notes what the ranks of a process do, from the moment at which it is made.

    Args:
        rank: whose events those are that name no other.
        clock: gives seconds.

    Attributes:
        events: what was noted.
    """

    def __init__(self, rank: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.events: list[Event] = []
        self._rank = rank
        self._clock = clock
        self._began = clock()

    def note(self, name: str, began: float, ended: float, rank: int | None = None, **arguments: Any) -> None:
        """Note a part of a step; when it began and ended, by the clock."""
        where = self._rank if rank is None else rank
        times = began - self._began, ended - self._began
        self.events.append(Event(name, Category.PHASE, where, *times, arguments))

    @contextlib.contextmanager
    def noting(self, name: str, **arguments: Any) -> Iterator[None]:
        """Note what is done inside."""
        began = self._clock()
        try:
            yield
        finally:
            self.note(name, began, self._clock(), **arguments)


def noting(recorder: Recorder | None, name: str) -> contextlib.AbstractContextManager[None]:
    """Return what notes what is done inside; nothing, where nobody records."""
    return _NOT_NOTING if recorder is None else recorder.noting(name)


_NOT_NOTING = contextlib.nullcontext()


def to_chrome(events: Iterable[Event]) -> dict[str, Any]:
    """Return events in the form that chrome://tracing and ui.perfetto.dev read: a process for each rank."""
    listed = list(events)
    threads = {category: number for number, category in enumerate(Category)}
    entries: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in listed}):
        entries.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        used = {event.category for event in listed if event.rank == rank}
        for category in sorted(used, key=threads.__getitem__):
            where = {"pid": rank, "tid": threads[category]}
            entries.append({"ph": "M", "name": "thread_name", **where, "args": {"name": category.value}})
    for event in listed:
        entries.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": event.category.value,
                "pid": event.rank,
                "tid": threads[event.category],
                "ts": event.began_s * _MICRO,
                "dur": (event.ended_s - event.began_s) * _MICRO,
                "args": dict(event.arguments),
            }
        )
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def from_chrome(values: Mapping[str, Any]) -> list[Event]:
    """Return the events of what `to_chrome` made."""
    return [
        Event(
            name=entry["name"],
            category=Category(entry["cat"]),
            rank=entry["pid"],
            began_s=entry["ts"] / _MICRO,
            ended_s=(entry["ts"] + entry["dur"]) / _MICRO,
            arguments=entry["args"],
        )
        for entry in values["traceEvents"]
        if entry["ph"] == "X"
    ]


def write(events: Iterable[Event], path: Path) -> None:
    """Write a trace; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_chrome(events)) + "\n", encoding="utf-8")
