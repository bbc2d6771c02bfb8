"""Keys by shard, and unique keys, in numpy. See `implementation.Implementation`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.exchange.layout import shards_of


def route(keys: NDArray[np.int64], order: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
    """See `Implementation.route`."""
    count = len(offsets) - 1
    shards = shards_of(keys, count)
    order[:] = np.argsort(shards.astype(np.uint16) if count <= 1 << 16 else shards, kind="stable")
    offsets[0] = 0
    np.cumsum(np.bincount(shards, minlength=count), out=offsets[1:])


def stray(keys: NDArray[np.int64], shard: int, shards: int) -> int:
    """See `Implementation.stray`."""
    others = np.flatnonzero(shards_of(keys, shards) != shard)
    return int(others[0]) if others.size else -1


def unique(keys: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """See `Implementation.unique`."""
    ordered, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    came = np.argsort(first, kind="stable")
    rank = np.empty_like(came)
    rank[came] = np.arange(len(came))
    places[:] = rank[inverse]
    return ordered[came]


def sum_rows(rows: NDArray[Any], places: NDArray[np.int64], sums: NDArray[Any]) -> None:
    """See `Implementation.sum_rows`."""
    _, first = np.unique(places, return_index=True)
    sums[:] = rows[first]
    again = np.ones(len(places), dtype=np.bool_)
    again[first] = False
    np.add.at(sums, places[again], rows[again])
