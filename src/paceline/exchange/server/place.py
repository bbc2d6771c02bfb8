"""Where a server stands in the chains of a view."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from paceline.exchange.view import Move, Turn, View


class Place(NamedTuple):
    """Where a server stands in the chain of a shard.

    Attributes:
        head: it is the shard's master.
        tail: it answers reads.
        successor: to whom it hands updates; None: to nobody.
        outgoing: by which the successor becomes a replica; None: it is one.
        incoming: by which this server becomes a replica; None: it is one.
        turn: by which this server, the head, becomes the tail.
    """

    head: bool
    tail: bool
    successor: int | None = None
    outgoing: Move | None = None
    incoming: Move | None = None
    turn: Turn | None = None


def places(view: View, server: int) -> dict[int, Place]:
    """Return the shards that a server has to do with, and where it stands in each."""
    found: dict[int, Place] = {}
    for shard, chain in enumerate(view.chains):
        if server in chain:
            found[shard] = Place(chain[0] == server, chain[-1] == server, view.successor(shard, server))
    for move in view.moves:
        if move.source == server and move.shard in found:
            found[move.shard] = found[move.shard]._replace(outgoing=move)
        elif move.target == server and move.shard not in found:
            found[move.shard] = Place(False, False, incoming=move)
    for turn in view.turns:
        if turn.head == server and turn.shard in found:
            found[turn.shard] = found[turn.shard]._replace(turn=turn)
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
    others = [shard for shard, place in stands.items() if not place.head and place.incoming is None]
    copies = [f"{shard} to {place.successor}" for shard, place in stands.items() if place.outgoing]
    parts = [f"server {server} in epoch {view.epoch}: master of {_listed(masters)}", f"replica of {_listed(others)}"]
    return "; ".join(parts + ([f"copies {', '.join(copies)}"] if copies else []))


def _listed(shards: list[int]) -> str:
    return ", ".join(map(str, shards)) or "none"
