"""What a step communicates, read off the graphs that run."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from paceline.runtime.traffic import exchanges


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
    for exchange in exchanges(graph) if graph is not None else ():
        before = found.get(exchange.kind, Volume())
        found[exchange.kind] = Volume(before.count + 1, before.bytes + exchange.bytes)
    return dict(sorted(found.items()))
