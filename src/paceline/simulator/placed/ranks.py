"""Ranks in virtual time: each computes, has a network beside it, and a host that starts its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.plan import Mesh
from paceline.trace import Category, Event

Seconds = NDArray[np.float64]
"""Of each rank: an array over the axes of the mesh, of size one along axes whose ranks are alike."""


@dataclass
class Ranks:
    """Ranks that run one program, each at its own speed.

    Args:
        mesh: how they are arranged.
        slowness: by how much each computes slower than the times say; ranks that are not named are as quick.
        launch_s: seconds that a host takes to start a call.
        watched: whose events are noted; by default those of rank 0 and of the slow ones.

    Attributes:
        now: when each is through with what it was given to compute.
        network: when its network is free.
        host: when its host is.
        computed: seconds in which it computed.
        exposed: seconds in which it waited for collectives, by axis.
        handed_bytes: of the tensors that a rank handed over, by axis.
        events: what the watched ranks did.
    """

    mesh: Mesh
    slowness: Mapping[int, float] = field(default_factory=dict)
    launch_s: float = 0.0
    watched: tuple[int, ...] | None = None
    exposed: dict[str, Seconds] = field(default_factory=dict)
    handed_bytes: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = tuple(size for _, size in self.mesh.axes)
        self._shape = sizes if self.slowness else (1,) * len(sizes)
        self._factor = np.ones(self._shape)
        for rank, factor in self.slowness.items():
            self._factor[self._place(rank)] = factor
        if self.watched is None:
            self.watched = (0, *sorted(set(self.slowness) - {0}))
        self._places = {rank: self._place(rank) for rank in self.watched}
        self.now, self.network, self.host, self.computed = (np.zeros(self._shape) for _ in range(4))

    def compute(self, seconds: float, name: str = "", **arguments: Any) -> None:
        """Let all ranks compute; where there is a name, the watched ones note it."""
        if self.launch_s:
            self.host = self.host + self.launch_s
            self.now = np.maximum(self.now, self.host)
        took = seconds * self._factor
        began = self.now
        self.now = began + took
        self.computed = self.computed + took
        if name:
            self.note(name, Category.COMPUTE, began, self.now, **arguments)

    def exchange(self, axis: str, seconds: float, begun: Seconds, name: str, **arguments: Any) -> Seconds:
        """Let the ranks along an axis exchange from when all of them have begun; return when each is through."""
        if self.launch_s:
            self.host = self.host + self.launch_s
            begun = np.maximum(begun, self.host)
        began = self._latest(np.maximum(begun, self.network), axis)
        ended = began + seconds
        self.network = ended
        self.note(name, Category.NETWORK, began, ended, **arguments)
        return ended

    def wait(self, axis: str, until: Seconds, name: str) -> None:
        """Let all ranks wait until a time of each."""
        waited = np.maximum(until - self.now, 0.0)
        self.exposed[axis] = self.exposed.get(axis, np.zeros(self._shape)) + waited
        if waited.any():
            self.note(name, Category.WAIT, self.now, self.now + waited)
        self.now = self.now + waited

    def note(self, name: str, category: Category, began: Seconds, ended: Seconds, **arguments: Any) -> None:
        """Note an event of the watched ranks."""
        for rank, place in self._places.items():
            start, end = float(np.broadcast_to(began, self._shape)[place]), float(ended[place])
            if end > start:
                self.events.append(Event(name, category, rank, start, end, arguments))

    def snapshot(self) -> Ranks:
        """Return how things stand, without events."""
        return replace(self, exposed=dict(self.exposed), handed_bytes=dict(self.handed_bytes), events=[])._at(self)

    def repeat(self, since: Ranks, times: int) -> None:
        """Let what happened since a snapshot happen so many more times; nothing is noted."""
        self.skip((self.now - since.now) * times)
        self.computed = self.computed + (self.computed - since.computed) * times
        for axis, waited in self.exposed.items():
            self.exposed[axis] = waited + (waited - since.exposed.get(axis, 0.0)) * times
        for axis, handed in self.handed_bytes.items():
            self.handed_bytes[axis] = handed + (handed - since.handed_bytes.get(axis, 0)) * times

    def alike(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that one stands for: all, where none is slow."""
        return (rank,) if self.slowness else tuple(range(self.mesh.size))

    def _at(self, other: Ranks) -> Ranks:
        self.now, self.network, self.host, self.computed = other.now, other.network, other.host, other.computed
        return self

    def skip(self, seconds: Seconds) -> None:
        """Let time pass that is accounted for otherwise."""
        self.now, self.network, self.host = self.now + seconds, self.network + seconds, self.host + seconds

    def of(self, rank: int, values: Seconds) -> float:
        """Return the value of one rank."""
        return float(values[self._place(rank)])

    def _latest(self, values: Seconds, axis: str) -> Seconds:
        """Return for each rank the latest value among those along an axis."""
        if axis not in self.mesh.names:
            return values
        latest = values.max(axis=self.mesh.names.index(axis), keepdims=True)
        return np.broadcast_to(latest, self._shape)

    def _place(self, rank: int) -> tuple[int, ...]:
        where = self.mesh.coordinate(rank).values()
        return tuple(min(index, size - 1) for index, size in zip(where, self._shape, strict=True))
