"""Walking a lowered graph in virtual time: compute and network are resources of their own.

A collective begins when all ranks along its axis have started it and their networks are free; its wait holds back what
is computed after it. Where collectives do not overlap with computing, they are done when they are waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from paceline.simulator.placed.ranks import Ranks, Seconds
from paceline.simulator.placed.started import Started, operator_name, started_by, starts, waits
from paceline.simulator.placed.times import Times


@dataclass(frozen=True)
class _UnderWay:
    """A collective that was started; `ended` is None where it is done in the wait."""

    started: Started
    module: str
    ended: Seconds | None


def walk(graph: Graph, times: Times, ranks: Ranks) -> None:
    """Let ranks run a graph; their clocks, accounts and events go on.

    Args:
        graph: one pass of a placed program, after `runtime.passes.communicate`.
        times: how long calls and collectives take.
        ranks: who runs it.
    """
    under_way: dict[Node, _UnderWay] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if starts(node):
            under_way[node] = _start(node, times, ranks)
        elif waits(node):
            _wait(under_way.pop(node.args[0]), times, ranks)
        else:
            seconds = times.operators.seconds(node)
            if seconds > 0:
                ranks.compute(seconds, operator_name(node), module=_module(node))


def _start(node: Node, times: Times, ranks: Ranks) -> _UnderWay:
    started = started_by(node)
    ranks.handed_bytes[started.axis] = ranks.handed_bytes.get(started.axis, 0) + started.handed_bytes
    ended = _exchanged(started, _module(node), times, ranks) if times.overlap else None
    return _UnderWay(started, _module(node), ended)


def _wait(exchange: _UnderWay, times: Times, ranks: Ranks) -> None:
    ended = exchange.ended
    if ended is None:
        ended = _exchanged(exchange.started, exchange.module, times, ranks)
    ranks.wait(exchange.started.axis, ended, exchange.started.name)


def _exchanged(started: Started, module: str, times: Times, ranks: Ranks) -> Seconds:
    seconds = times.collectives.seconds(started.kind, started.whole_bytes, started.axis)
    return ranks.exchange(started.axis, seconds, ranks.now, started.name, module=module, bytes=started.handed_bytes)


def _module(node: Node) -> str:
    return str(node.meta.get("module") or "")
