"""Where a server stands in the chains of a view."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from paceline.exchange.view import View


class Place(NamedTuple):
    """Where a server stands in the chain of a shard.

    Attributes:
        head: it is the shard's master.
        tail: it answers reads.
        successor: to whom it hands updates; None: to nobody.
        moving: the successor is a replica in the making.
        source: who makes this server a replica; None: it is one.
    """

    head: bool
    tail: bool
    successor: int | None = None
    moving: bool = False
    source: int | None = None


def places(view: View, server: int) -> dict[int, Place]:
    """Return the shards that a server has to do with, and where it stands in each."""
    found: dict[int, Place] = {}
    for shard, chain in enumerate(view.chains):
        if server in chain:
            tail, successor = chain[-1] == server, view.successor(shard, server)
            found[shard] = Place(chain[0] == server, tail, successor, tail and successor is not None)
    for move in view.moves:
        if move.target == server and move.shard not in found:
            found[move.shard] = Place(False, False, source=move.source)
    return found


def unloaded(view: View, server: int, held: Collection[int]) -> list[int]:
    """Return the shards that a server is to hold as a full replica and does not: those that the job begins with.

    Later replicas get theirs by a copy before they are in a chain.
    """
    return [shard for shard, chain in enumerate(view.chains) if server in chain and shard not in held]


def said(view: View, server: int) -> str:
    """Return where a server stands, as a line of its log."""
    stands = places(view, server)
    masters = [shard for shard, place in stands.items() if place.head]
    others = [shard for shard, place in stands.items() if not place.head and place.source is None]
    copies = [f"{shard} to {place.successor}" for shard, place in stands.items() if place.moving]
    parts = [f"epoch {view.epoch}: master of {_listed(masters)}", f"replica of {_listed(others)}"]
    return "; ".join(parts + ([f"copies {', '.join(copies)}"] if copies else []))


def _listed(shards: list[int]) -> str:
    return ", ".join(map(str, shards)) or "none"
