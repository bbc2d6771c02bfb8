"""Several tables in one call, in numpy: one after the other. See `implementation.Implementation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.exchange.table.implementation import Rows
from paceline.exchange.table.portable import route


def stray(keys: NDArray[np.int64], bounds: Sequence[int], numbers: Sequence[int], shards: int) -> int:
    """See `Implementation.stray_of_several`."""
    for shard, part in zip(numbers, _parts(bounds, len(numbers), len(keys)), strict=True):
        place = route.stray(keys[part], shard, shards)
        if place >= 0:
            return int(part.start) + place
    return -1


def update(tables: Sequence[Rows], bounds: Sequence[int], keys: NDArray[np.int64], gradients: NDArray[Any]) -> None:
    """See `Implementation.update_several`."""
    for table, part in zip(tables, _parts(bounds, len(tables), len(keys)), strict=True):
        table.update(keys[part], gradients[part])


def read(tables: Sequence[Rows], bounds: Sequence[int], keys: NDArray[np.int64], out: NDArray[Any]) -> None:
    """See `Implementation.read_several`."""
    for table, part in zip(tables, _parts(bounds, len(tables), len(keys)), strict=True):
        table.read(keys[part], out[part])


def _parts(bounds: Sequence[int], several: int, count: int) -> Iterator[slice]:
    """Return where the keys of each are.

    Raises:
        ValueError: bounds are not those of so many parts of so many keys.
    """
    if len(bounds) != several + 1 or bounds[0] < 0 or bounds[-1] > count:
        raise ValueError("bounds do not fit")
    if any(begin > end for begin, end in pairwise(bounds)):
        raise ValueError("bounds do not rise")
    return starmap(slice, pairwise(bounds))
