"""Traces: what ranks did when, in a run or in virtual time, for Perfetto and Chrome's viewer.

The same nouns serve both, so that a simulated step can be laid beside a real one. This module knows nothing of PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

_MICRO = 1e6


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
