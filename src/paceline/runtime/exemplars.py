"""One call of each kind that graphs have, run in their order again and again, and timed each time.

Alone and at once again, a call would find its inputs, its result's memory and its own code in the caches, as no step
does. Here each finds them as a step would: the calls between two runs of one are those of the graphs, what an earlier
call made is what a later one reads, results live until their last reader, and their memory is reused as it comes.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from paceline.placement.calls import resolve
from paceline.runtime.operator_calls import arguments, is_timed, key_of, made_up, nbytes_of

_OWN_SHARE = 0.9
"""Of the time of a call this thread must have had the processor, or somebody else did."""
_TOLD_FROM_S = 50e-6
"""Of shorter calls it cannot be told: to ask takes a microsecond itself."""
_ENOUGH = 2
"""So many undisturbed rounds make a median."""


class Clock(Protocol):
    """Times calls on a device."""

    def start(self) -> None:
        """A call begins."""
        ...

    def stop(self, key: str) -> None:
        """The call of that key has ended, or was handed to the device."""
        ...

    def laps(self) -> dict[str, Lap]:
        """Return what calls took since this was asked last."""
        ...


@dataclass(frozen=True)
class Lap:
    """What one call took.

    Attributes:
        seconds: by the clock.
        own: of the processor, for this thread; None where it computes on a device of its own.
    """

    seconds: float
    own: float | None = None

    @property
    def disturbed(self) -> bool:
        """Whether something else had the processor meanwhile."""
        return self.own is not None and self.seconds > _TOLD_FROM_S and self.own < _OWN_SHARE * self.seconds


class HostClock:
    """Times calls that the thread itself computes."""

    def __init__(self) -> None:
        self._found: dict[str, Lap] = {}

    def start(self) -> None:
        """A call begins."""
        self._cpu = time.thread_time()
        self._began = time.perf_counter()

    def stop(self, key: str) -> None:
        """The call has ended."""
        seconds = time.perf_counter() - self._began
        self._found[key] = Lap(seconds, time.thread_time() - self._cpu)

    def laps(self) -> dict[str, Lap]:
        """Return what calls took."""
        found, self._found = self._found, {}
        return found


class DeviceClock:
    """Times calls on a CUDA device by events in its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def start(self) -> None:
        """A call begins."""
        self._began = self._event()

    def stop(self, key: str) -> None:
        """The call was handed to the device."""
        self._events[key] = self._began, self._event()

    def laps(self) -> dict[str, Lap]:
        """Wait for the device; return what calls took."""
        torch.cuda.synchronize(self._device)
        found = {key: Lap(began.elapsed_time(ended) * 1e-3) for key, (began, ended) in self._events.items()}
        self._events = {}
        return found

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
        event.record(torch.cuda.current_stream(self._device))
        return event


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class Exemplars:
    """One call of each key, in the order of graphs.

    Args:
        graphs: placed ones, in the order in which a step runs them.
        device: where calls run.
        known: keys that need not be timed; their calls are left out.
        room_bytes: of inputs and results at once; calls that would exceed it are left out.

    Attributes:
        failed: calls that do not run on made-up values.
    """

    def __init__(
        self, graphs: Iterable[Graph], device: torch.device, *, known: Container[str] = (), room_bytes: int = 4 << 30
    ) -> None:
        self._device = device
        self._nodes = _one_of_each(graphs, known, room_bytes)
        last = {source: key for key, node in self._nodes.items() for source in self._sources_of(node)}
        self._dead: dict[str, list[str]] = defaultdict(list)
        for source, key in last.items():
            self._dead[key].append(source)
        self._pool: dict[tuple[int, int], Any] = {}
        self._laps: dict[str, list[Lap]] = defaultdict(list)
        self._clock = clock_of(device)
        self.failed: set[str] = set()

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def seconds(self) -> dict[str, float]:
        """What calls take, by key: medians of rounds that nothing disturbed, or of what they had of the processor."""
        return {key: _typical(laps) for key, laps in self._laps.items()}

    @torch.no_grad()
    def round(self, *, counts: bool = True, within_s: float = math.inf) -> None:
        """Run every call once.

        Args:
            counts: what they take is kept. The first round should not count: libraries load, and memory is new.
            within_s: calls that are left after so many seconds are left out, for good.
        """
        ends = time.perf_counter() + within_s
        made: dict[str, Any] = {}
        for key, node in self._nodes.items():
            if key in self.failed:
                continue
            if time.perf_counter() > ends:
                self.failed.add(key)
                continue
            try:
                self._run(key, node, made)
            except (RuntimeError, IndexError, ValueError, TypeError):
                self.failed.add(key)
        for key, lap in self._clock.laps().items():
            if counts:
                self._laps[key].append(lap)

    def _run(self, key: str, node: Node, made: dict[str, Any]) -> None:
        target: Any = node.target
        args, kwargs = arguments(node, lambda source: self._value(source, made), self._device)
        dead = self._dead.get(key, ())
        self._clock.start()
        result = target(*args, **kwargs)
        # What nobody reads any longer is freed here, as generated code does.
        del args, kwargs
        for name in dead:
            made.pop(name, None)
        if node.users:
            made[key] = result
        del result
        self._clock.stop(key)

    def _sources_of(self, node: Node) -> list[str]:
        """Keys of the calls that make what a node reads, where they are among ours."""
        makers = [resolve(source).node for source in node.all_input_nodes]
        return [key for key in (key_of(maker) for maker in makers if is_timed(maker)) if key in self._nodes]

    def _value(self, source: Node, made: dict[str, Any]) -> Any:
        """What a call reads: what an earlier one of this round has made, or a tensor kept for this purpose."""
        maker = resolve(source)
        if is_timed(maker.node):
            found = made.get(key_of(maker.node))
            if found is not None:
                return found if source is maker.node else found[maker.index]
        name = id(maker.node), maker.index
        if name not in self._pool:
            self._pool[name] = made_up(source.meta["val"], self._device)
        return self._pool[name]


def _one_of_each(graphs: Iterable[Graph], known: Container[str], room_bytes: int) -> dict[str, Node]:
    """Return the first call of each key, in order, as far as there is room."""
    found: dict[str, Node] = {}
    for node in (node for graph in graphs for node in graph.nodes if is_timed(node)):
        key = key_of(node)
        if key in found or key in known:
            continue
        room_bytes -= sum(nbytes_of(each.meta.get("val")) for each in (node, *node.all_input_nodes))
        if room_bytes < 0:
            break
        found[key] = node
    return found


def _typical(laps: Sequence[Lap]) -> float:
    quiet = [lap.seconds for lap in laps if not lap.disturbed]
    if len(quiet) >= _ENOUGH:
        return median(quiet)
    return median(lap.seconds if lap.own is None or not lap.disturbed else lap.own for lap in laps)
