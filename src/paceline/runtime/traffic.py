"""What ranks exchange while a graph runs: read off its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from paceline.placement.windows import window, window_sum
from paceline.runtime.collectives import STARTS
from paceline.runtime.windows import sent_bytes

HALO = "halo"


@dataclass(frozen=True)
class Exchange:
    """A collective.

    Attributes:
        axis: along which axis of the mesh.
        kind: `all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all` or `halo`.
        bytes: of the tensor that a rank hands over; for a halo, what the rank sends that sends most.
    """

    axis: str
    kind: str
    bytes: int


def exchanges(graph: Graph) -> Iterator[Exchange]:
    """Yield the collectives of a graph, in order."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in STARTS:
            continue
        if is_halo(node):
            yield Exchange(_axis(node), HALO, sent_bytes(node))
        else:
            kind = node.target.__name__.removesuffix("_in_place").removesuffix("_max")
            yield Exchange(_axis(node), kind, node.args[0].meta["val"].nbytes)


def is_halo(node: Node) -> bool:
    """Whether a call exchanges rows between neighbours."""
    return node.target in (window, window_sum)


def _axis(node: Node) -> str:
    arguments: tuple[Any, ...] = node.args
    return str(arguments[-2])
