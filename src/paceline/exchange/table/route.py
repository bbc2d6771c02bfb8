"""Keys by shard, and keys that come several times made one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.table.choice import chosen
from paceline.exchange.table.implementation import Implementation


class Routed(NamedTuple):
    """Keys in the order of their shards.

    Attributes:
        order: [n] int64: `keys[order]` is sorted by shard, and within a shard in the order in which they were given.
        offsets: [shards + 1] int64: where in it each shard begins and ends.
    """

    order: Tensor
    offsets: Tensor


def route(keys: Tensor, shards: int, implementation: Implementation | None = None) -> Routed:
    """Return which keys go to which shard. keys: [n] int64."""
    _check(keys)
    order = np.empty(len(keys), dtype=np.int64)
    offsets = np.zeros(shards + 1, dtype=np.int64)
    (implementation or chosen()).route(keys.contiguous().numpy(), order, offsets)
    return Routed(torch.from_numpy(order), torch.from_numpy(offsets))


def stray_key(keys: Tensor, shard: int, shards: int, implementation: Implementation | None = None) -> int | None:
    """Return the first key that is of another shard; None where all are of this one. keys: [n] int64."""
    _check(keys)
    array = (keys if keys.is_contiguous() else keys.contiguous()).numpy()
    place = (implementation or chosen()).stray(array, shard, shards)
    return None if place < 0 else int(keys[place])


def stray_of_several(
    keys: Tensor,
    bounds: Sequence[int],
    numbers: Sequence[int],
    shards: int,
    implementation: Implementation | None = None,
) -> int | None:
    """Return the first key that is of another shard than its part says; None where there is none.

    Args:
        keys: [n] int64, those of part i from `bounds[i]` to `bounds[i + 1]`.
        bounds: [parts + 1], rising.
        numbers: the shard of each part.
        shards: of all.
        implementation: None: this process's.
    """
    _check(keys)
    array = (keys if keys.is_contiguous() else keys.contiguous()).numpy()
    place = (implementation or chosen()).stray_of_several(array, bounds, numbers, shards)
    return None if place < 0 else int(keys[place])


def unique_keys(keys: Tensor, implementation: Implementation | None = None) -> tuple[Tensor, Tensor]:
    """Return each key once, in the order in which they first came, and of each given one its place there.

    keys: [n] int64 -> [unique] int64, [n] int64.
    """
    _check(keys)
    places = np.empty(len(keys), dtype=np.int64)
    first = (implementation or chosen()).unique(keys.contiguous().numpy(), places)
    return torch.from_numpy(first), torch.from_numpy(places)


def unique_rows(keys: Tensor, gradients: Tensor, implementation: Implementation | None = None) -> tuple[Tensor, Tensor]:
    """Return each key once, as `unique_keys`, with the sum of its rows, added in the order in which they came.

    keys: [n] int64; gradients: [n, width] of float32 or float64 -> [unique], [unique, width].
    """
    if gradients.ndim != 2 or len(gradients) != len(keys) or gradients.dtype not in (torch.float32, torch.float64):
        raise ExchangeError(
            f"rows of {len(keys)} keys are {gradients.dtype} of {tuple(gradients.shape)}; they are float32 or float64, "
            "and as many."
        )
    unique, places = unique_keys(keys, implementation)
    if len(unique) == len(keys):
        return unique, gradients.contiguous()
    sums = np.empty((len(unique), gradients.shape[1]), dtype=gradients.numpy().dtype)
    (implementation or chosen()).sum_rows(gradients.contiguous().numpy(), places.numpy(), sums)
    return unique, torch.from_numpy(sums)


def _check(keys: Tensor) -> None:
    if keys.dtype != torch.int64 or keys.ndim != 1:
        raise ExchangeError(f"keys are {keys.dtype} of {tuple(keys.shape)}; they are torch.int64 of (n,).")
