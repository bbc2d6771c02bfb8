"""Parameters that arrive while the forward pass runs: each is waited for right before it is first read.

Their memory is an input of the graph from the start; somebody else fills it, in the order in which the pass reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

from torch.fx import Graph, Node

from paceline.runtime.step import Step

Arrival: TypeAlias = Callable[[str], None]
"""Returns once the parameter of this name is there."""


def order_of_use(step: Step) -> list[str]:
    """Return the names of the inputs that the forward pass reads, in the order of their first readers."""
    return [name for _, name in _first_readers(step.forward, step)]


def with_arrivals(step: Step, awaited: Collection[str], arrived: Arrival) -> Graph:
    """Return a copy of the forward graph that calls `arrived(name)` before it first reads each input in `awaited`."""
    graph = Graph()
    graph.output(graph.graph_copy(step.forward, {}))
    for reader, name in _first_readers(graph, step):
        if name in awaited:
            with graph.inserting_before(reader):
                graph.call_function(arrived, (name,))
    return graph


def _first_readers(graph: Graph, step: Step) -> list[tuple[Node, str]]:
    """Return who first reads each input of a step's forward graph, in the order of the graph.

    Views count: `reshape` may copy, and they stand right before who reads them.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    found = [
        (min(node.users, key=order.__getitem__), placed.item.name)
        for node, placed in zip(inputs, step.inputs, strict=True)
        if node.users
    ]
    return sorted(found, key=lambda pair: order[pair[0]])
