"""Consistent hashing: where shards go first, and whom they prefer later.

Servers have many points each on a ring, shards have one (Karger et al., 1997). A shard goes to the first servers that
it meets clockwise and that are not full (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads",
2018). Shards are few and all of a size, so nobody is given more than the mean, rounded up.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Final, TypeAlias

Chain: TypeAlias = tuple[int, ...]
"""Servers that hold a shard, head first."""

_POINTS: Final = 64
"""Points of a server."""


def _point(*what: object) -> int:
    return int.from_bytes(blake2b(" ".join(map(str, what)).encode(), digest_size=8).digest())


class Ring:
    """Servers on a ring."""

    def __init__(self, servers: Iterable[int]) -> None:
        self._servers = sorted(servers)
        self._points = sorted((_point("server", one, i), one) for one in self._servers for i in range(_POINTS))

    def walk(self, shard: int) -> Chain:
        """Return all servers in the order in which a shard meets them."""
        start = bisect(self._points, (_point("shard", shard), -1))
        met: dict[int, None] = {}
        for at in range(start - len(self._points), start):
            met[self._points[at][1]] = None
            if len(met) == len(self._servers):
                break
        return tuple(met)


@lru_cache(maxsize=4096)
def preferences(servers: tuple[int, ...], shard: int) -> Chain:
    """Return all of these servers in the order in which a shard meets them."""
    return _ring(servers).walk(shard)


@lru_cache(maxsize=16)
def _ring(servers: tuple[int, ...]) -> Ring:
    return Ring(servers)


def chains(servers: Iterable[int], shards: int, replication: int) -> tuple[Chain, ...]:
    """Return chains for shards that nobody holds yet.

    Heads are dealt first, then the second of each chain, and so on; in each round a server is full at the mean. Where a
    shard meets only servers that are full or that it has, the least full takes one more.

    Args:
        servers: at least one.
        shards: their number.
        replication: length of a chain, as far as there are as many servers.
    """
    places = tuple(sorted(servers))
    made: list[Chain] = [()] * shards
    for _ in range(min(replication, len(places))):
        full = -(-shards // len(places))
        held: Counter[int] = Counter()
        for shard, chain in enumerate(made):
            free = [one for one in preferences(places, shard) if one not in chain]
            chosen = next((one for one in free if held[one] < full), min(free, key=lambda one: held[one]))
            held[chosen] += 1
            made[shard] = (*chain, chosen)
    return tuple(made)
