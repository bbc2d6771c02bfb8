"""From one view to the next: pure functions of who is there.

What they promise, whoever comes and goes in whatever order: a shard of which any copy lives has one head, which was in
its chain before or held a finished copy; a chain only ever loses servers, and gains the target of a finished move at
its end; in a chain each server reaches the next, for all that was said; a server that wants to leave keeps its shards
until others have them; and once nobody comes or goes any more, every shard has `replication` copies (as far as there
are servers that reach each other), on different machines (as far as there are such), and nothing moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from paceline.exchange.job import Job
from paceline.exchange.membership import ring
from paceline.exchange.membership.balance import Loads, copy, shift, shortened
from paceline.exchange.membership.partitions import joined, unreached
from paceline.exchange.membership.ring import Chain
from paceline.exchange.view import Address, Move, Turn, View

_AT_ONCE: Final = 4
"""Moves from one source, and to one target: a shard is locked while it is copied out."""


def begun(view: View, servers: Mapping[int, Address], job: Job) -> View:
    """Return the first view that has chains: all these servers load their shards from the snapshot."""
    made = list(ring.chains(servers, job.shards, job.replication))
    loads = Loads(made, servers, _machines(servers))
    while step := shift(list(enumerate(made)), loads):
        loads.replace(made[step.shard], step.after)
        made[step.shard] = step.after
    return View(view.epoch + 1, dict(servers), tuple(made), (), view.epoch + 1)


def next_view(
    view: View,
    servers: Mapping[int, Address],
    job: Job,
    *,
    leaving: Collection[int] = (),
    synced: Collection[Move] = (),
    turned: Collection[Turn] = (),
    parted: Collection[frozenset[int]] = (),
) -> View:
    """Return the view that follows, or the same one where nothing is to change.

    Args:
        view: has chains.
        servers: who is there.
        job: its replication.
        leaving: who is there and wants to go: it is given nothing, and what it has goes to others.
        synced: moves whose targets have all that their sources have.
        turned: turns whose heads have handed all on.
        parted: pairs of servers that do not reach each other.
    """
    staying = [server for server in servers if server not in leaving]
    length = min(job.replication, len(staying))
    there = (tuple(server for server in chain if server in servers) for chain in view.chains)
    chains = [joined(chain, parted, leaving) for chain in there]
    loads = Loads(chains, staying, _machines(servers))
    moves = [
        move
        for move in view.moves
        if _stands(move, chains, servers, staying, synced) and frozenset((move.source, move.target)) not in parted
    ]
    turns = _go_on_turning(view, chains, loads, leaving, turned, parted)
    under_way = {shard for shard, *_ in (*moves, *turns)}
    for shard, chain in enumerate(chains):
        if shard not in under_way:
            chains[shard] = _trimmed(chain, length, leaving, loads)
    for move in moves:  # in the order in which they began: loads are as if all were done
        chain = (*chains[move.shard], move.target)
        loads.replace(chains[move.shard], chain)
        trimmed = _trimmed(chain, length, leaving, loads)
        if move in synced:
            chains[move.shard] = trimmed
    moves = [move for move in moves if move not in synced]
    under_way = {shard for shard, *_ in (*moves, *turns)}
    at_rest = {shard: chain for shard, chain in enumerate(chains) if chain and shard not in under_way}
    moves += _begun_moves(at_rest, moves, length, leaving, loads, parted, view.epoch + 1)
    if not moves and not turns:
        turns = _begun_turns(at_rest, loads, parted, view.epoch + 1)
    made = replace(view, servers=dict(servers), chains=tuple(chains), moves=tuple(moves), turns=tuple(turns))
    return view if made == view else replace(made, epoch=view.epoch + 1)


def _machines(servers: Mapping[int, Address]) -> dict[int, str]:
    return {server: address.machine for server, address in servers.items()}


def may_go(view: View, server: int) -> bool:
    """Return whether nothing depends on a server."""
    moving = {server for move in view.moves for server in (move.source, move.target)}
    return server not in moving and not any(server in chain for chain in view.chains)


def lost(view: View) -> tuple[int, ...]:
    """Return the shards of which no copy is left."""
    return tuple(shard for shard, chain in enumerate(view.chains) if not chain)


def _stands(
    move: Move,
    chains: Sequence[Chain],
    servers: Mapping[int, Address],
    staying: Collection[int],
    synced: Collection[Move],
) -> bool:
    """Whether a copy is finished, even if its source is gone since, or goes on: its source is the tail."""
    if move in synced:
        return move.target in servers
    return move.target in staying and chains[move.shard][-1:] == (move.source,)


def _trimmed(chain: Chain, length: int, leaving: Collection[int], loads: Loads) -> Chain:
    """A chain without who leaves, if the others suffice, and not longer than need be."""
    stay = tuple(server for server in chain if server not in leaving)
    if not stay or len(stay) < length:
        return chain
    loads.replace(chain, stay)
    return shortened(stay, length, loads)


def _go_on_turning(
    view: View,
    chains: list[Chain],
    loads: Loads,
    leaving: Collection[int],
    turned: Collection[Turn],
    parted: Collection[frozenset[int]],
) -> list[Turn]:
    """Turn the chains whose heads are ready; return the other turns, where nothing else has happened to the chain."""
    left = []
    for turn in view.turns:
        chain = chains[turn.shard]
        after = (*chain[1:], *chain[:1])
        if chain != view.chains[turn.shard] or frozenset(after[-2:]) in parted or not set(leaving).isdisjoint(chain):
            continue
        loads.replace(chain, after)
        if turn in turned:
            chains[turn.shard] = after
        else:
            left.append(turn)
    return left


def _begun_turns(
    chains: Mapping[int, Chain], loads: Loads, parted: Collection[frozenset[int]], epoch: int
) -> list[Turn]:
    """Turns that even what servers have to do, without a copy: where all servers have all shards, nothing else can."""
    begun: list[Turn] = []
    heads: Counter[int] = Counter()
    for shard, chain in chains.items():
        after = (*chain[1:], chain[0])
        if heads[chain[0]] < _AT_ONCE and frozenset(after[-2:]) not in parted and loads.growth(chain, after) < 0:
            heads[chain[0]] += 1
            loads.replace(chain, after)
            begun.append(Turn(shard, chain[0], epoch))
    return begun


def _begun_moves(
    open_shards: dict[int, Chain],
    moves: Sequence[Move],
    length: int,
    leaving: Collection[int],
    loads: Loads,
    parted: Collection[frozenset[int]],
    epoch: int,
) -> list[Move]:
    """Further moves: first to where copies lack, and once none lack, to where there is less to do.

    Each makes the imbalance smaller once those before it are done, so moves come to an end.
    """
    limits = _Limits(moves)
    begun: list[Move] = []
    lacking = {
        shard: stay
        for shard, chain in open_shards.items()
        if len(stay := tuple(server for server in chain if server not in leaving)) < length
    }
    for shard, stay in sorted(lacking.items(), key=lambda entry: len(entry[1])):
        step = copy(shard, stay, loads, unreached((*stay[-1:], open_shards[shard][-1]), parted))
        if step and limits.allow(open_shards[shard][-1], step.target):
            limits.take(open_shards[shard][-1], step.target)
            loads.replace(open_shards[shard], step.after)
            begun.append(Move(shard, open_shards[shard][-1], step.target, epoch))
    if lacking:
        return begun
    while step := shift(
        list(open_shards.items()),
        loads,
        lambda chain, target: limits.allow(chain[-1], target) and target not in unreached(chain[-2:], parted),
    ):
        chain = open_shards.pop(step.shard)
        limits.take(chain[-1], step.target)
        loads.replace(chain, step.after)
        begun.append(Move(step.shard, chain[-1], step.target, epoch))
    return begun


class _Limits:
    """Moves that a server takes part in; what is too much waits for a later view."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._sources = Counter(move.source for move in moves)
        self._targets = Counter(move.target for move in moves)

    def allow(self, source: int, target: int) -> bool:
        """Whether a further one is not too much."""
        return max(self._sources[source], self._targets[target]) < _AT_ONCE

    def take(self, source: int, target: int) -> None:
        """Count one in."""
        self._sources[source] += 1
        self._targets[target] += 1
