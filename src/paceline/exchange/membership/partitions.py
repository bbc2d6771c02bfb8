"""Servers that do not reach each other, though the coordinator reaches both."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

AGAIN_S: Final = 60.0
"""After how long two servers that did not reach each other are given something in common again, to see if they do."""


class Partitions:
    """What servers have said of each other lately."""

    def __init__(self) -> None:
        self._said_s: dict[frozenset[int], float] = {}

    @property
    def pairs(self) -> frozenset[frozenset[int]]:
        """Pairs that are to have no shard in common."""
        return frozenset(self._said_s)

    def add(self, one: int, other: int, now_s: float) -> None:
        """One does not reach the other."""
        self._said_s[frozenset((one, other))] = now_s

    def forget(self, server: int) -> None:
        """A server is gone."""
        self._said_s = {pair: said_s for pair, said_s in self._said_s.items() if server not in pair}

    def expire(self, now_s: float) -> bool:
        """Forget what was said long ago; return whether there was any of it."""
        kept = {pair: said_s for pair, said_s in self._said_s.items() if now_s - said_s < AGAIN_S}
        changed = len(kept) < len(self._said_s)
        self._said_s = kept
        return changed


def joined(chain: tuple[int, ...], pairs: Collection[frozenset[int]], leaving: Collection[int]) -> tuple[int, ...]:
    """Return a chain in which each server reaches the next.

    Of two that do not reach each other one is given up as if it were gone: who leaves anyway, else who is cut off from
    more servers, else the later one, so that the shard keeps its master.
    """
    at = 0
    while at + 1 < len(chain):
        one, other = chain[at : at + 2]
        if frozenset((one, other)) not in pairs:
            at += 1
            continue
        worse = max(other, one, key=lambda server: (server in leaving, sum(server in pair for pair in pairs)))
        chain = tuple(server for server in chain if server != worse)
        at = max(0, at - 1)
    return chain


def unreached(ends: tuple[int, ...], pairs: Collection[frozenset[int]]) -> frozenset[int]:
    """Return the servers that one of these does not reach.

    Args:
        ends: the last servers of a chain, after one of which another is to come.
        pairs: that do not reach each other.
    """
    return frozenset().union(*(pair.difference(ends) for pair in pairs if not pair.isdisjoint(ends)))
