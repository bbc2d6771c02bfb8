"""Measuring what operators, and collectives between the ranks of a job, take here.

Operators take about a second, on one rank; a mesh axis takes a fraction of one, on all ranks together.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import Graph

from paceline.placement.machine import Curve, Link, Links, Machine, two_digits
from paceline.placement.redistribute import Collective
from paceline.program.fake import fake_mode
from paceline.runtime import collectives
from paceline.runtime.executor import Executor

_SIDES = (32, 64, 128, 256, 512, 1024)
_ELEMENTS = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
_CALLS = 300
_AT_LEAST_S = 0.01
_TOO_LONG_S = 0.1
_TRIES = 3
_SMALL, _LARGE = (1 << 10, 20), (1 << 20, 6)
"""Elements of a tensor that is sent, and how often it is."""


def processor() -> str:
    """Return the name of this machine's processor."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measured_machine(device: torch.device) -> Machine:
    """Return the rates of operators on a device, with as many threads as there are now; no links."""
    per_call = _per_call(device)
    return Machine(
        per_call=two_digits(per_call),
        products=_products(device, torch.float32, per_call),
        half_products=_products(device, torch.bfloat16, per_call),
        touching=_touching(device, per_call),
    )


def measured_links(executor: Executor, axis: str, parts: int, device: torch.device) -> Links:
    """Return what collectives over a mesh axis take. A collective."""
    return {kind: _link(executor, kind, axis, parts, device) for kind in Collective}


def _per_call(device: torch.device) -> float:
    x = torch.ones(16, device=device)

    def calls() -> None:
        for _ in range(_CALLS):
            torch.ops.aten.add.Tensor(x, x)

    return _seconds(calls, device) / _CALLS


def _products(device: torch.device, dtype: torch.dtype, per_call: float) -> Curve:
    """Rates of products of square matrices; they grow with the size, what falls was disturbed."""
    points: list[tuple[float, float]] = []
    for side in _SIDES:
        x = torch.ones(side, side, device=device, dtype=dtype)
        seconds = _seconds(lambda x=x: torch.mm(x, x), device)  # type: ignore[misc]  # bound early
        rate = _rate(2.0 * side**3, seconds, per_call)
        points.append((2.0 * side**3, max(rate, points[-1][1] if points else 0.0)))
        if seconds > _TOO_LONG_S:
            break
    return Curve(tuple(points))


def _touching(device: torch.device, per_call: float) -> Curve:
    points = []
    for count in _ELEMENTS:
        x, y = torch.ones(count, device=device), torch.ones(count, device=device)
        out = torch.empty_like(x)
        seconds = _seconds(lambda x=x, y=y, out=out: torch.add(x, y, out=out), device)  # type: ignore[misc]  # bound early
        points.append((12.0 * count, _rate(12.0 * count, seconds, per_call)))
    return Curve(tuple(points))


def _rate(work: float, seconds: float, per_call: float) -> float:
    """Units of work per second, without what the call itself takes."""
    return two_digits(work / max(seconds - per_call, 0.2 * seconds))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the least time that some work takes, of a few tries that repeat it; of one, where that takes long."""
    first = _once(work, device)
    if first > _TOO_LONG_S:
        return first
    repeat = max(1, min(1000, int(_AT_LEAST_S / _once(work, device))))

    def repeated() -> None:
        for _ in range(repeat):
            work()

    return min(_once(repeated, device) for _ in range(_TRIES)) / repeat


def _once(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - began, 1e-9)


def _link(executor: Executor, kind: Collective, axis: str, parts: int, device: torch.device) -> Link:
    times, sizes = [], []
    for count, repeat in (_SMALL, _LARGE):
        x = given_to(kind, count, parts, device)
        run = executor.prepare(exchange_graph(kind.value, x, axis, parts), {})
        found = [_once(lambda run=run, x=x: run([[x]]), device) for _ in range(repeat)]  # type: ignore[misc]  # bound early
        times.append(min(found))
        sizes.append(4 * count)
    per_byte = max(times[1] - times[0], 0.1 * times[1]) / (sizes[1] - sizes[0])
    return Link(two_digits(times[0]), two_digits(per_byte))


def given_to(kind: Collective, count: int, parts: int, device: torch.device) -> Tensor:
    """Return what a rank gives where the whole tensor has `count` elements, or nearly so many."""
    count -= count % parts**2
    match kind:
        case Collective.ALL_REDUCE:
            return torch.ones(count, device=device)
        case Collective.REDUCE_SCATTER:
            return torch.ones(parts, count // parts, device=device)
        case Collective.ALL_GATHER:
            return torch.ones(count // parts, device=device)
        case Collective.ALL_TO_ALL:
            return torch.ones(parts, count // parts**2, device=device)


def exchange_graph(name: str, given: Tensor, axis: str, parts: int) -> Graph:
    """Return a graph that starts a collective of `runtime.collectives.FUNCTIONS` and waits for it."""
    start = collectives.FUNCTIONS[name]
    graph = Graph()
    x = graph.placeholder("x")
    started = graph.call_function(start, (x, axis, parts))
    waited = graph.call_function(collectives.wait, (started,))
    graph.output((waited,))
    with fake_mode():
        x.meta["val"] = torch.empty(given.shape, device=given.device)
        started.meta["val"] = waited.meta["val"] = start(x.meta["val"], axis, parts)
    return graph
