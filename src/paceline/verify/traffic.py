"""What a step communicates, read off the graphs that run."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from paceline.placement.windows import window, window_sum
from paceline.runtime.collectives import STARTS
from paceline.runtime.windows import sent_bytes

_HALO = "halo"


@dataclass(frozen=True)
class Volume:
    """How often a kind of collective is called on each rank, and the bytes that a rank hands to it in all."""

    count: int = 0
    bytes: int = 0


def traffic(graph: Graph | None) -> dict[str, Volume]:
    """Return the collectives of one pass of a step, by kind.

    A bucket is one collective. Bytes are those of the tensor that is handed over: the shard for an all-gather, all
    terms for a reduce-scatter or an all-reduce. What of it crosses a link depends on the algorithm. For a halo they are
    the rows that are sent, by the rank that sends most.
    """
    found: dict[str, Volume] = {}
    for node in graph.nodes if graph is not None else ():
        if node.op == "call_function" and node.target in STARTS:
            kind = _HALO if node.target in (window, window_sum) else node.target.__name__
            kind = kind.removesuffix("_in_place").removesuffix("_max")
            before, value = found.get(kind, Volume()), node.args[0].meta["val"]
            nbytes = sent_bytes(node) if kind == _HALO else value.numel() * value.element_size()
            found[kind] = Volume(before.count + 1, before.bytes + nbytes)
    return dict(sorted(found.items()))
