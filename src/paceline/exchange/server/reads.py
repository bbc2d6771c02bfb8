"""What a read takes out of a shard, and whether anybody may see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.server.replica import Replica
from paceline.exchange.server.requests import Read
from paceline.exchange.shard.shard import Shard
from paceline.exchange.shard.together import read_together


def value_of(read: Read, tails: Mapping[int, Replica]) -> Tensor:
    """Return what is asked for, where it was asked for or lent.

    Raises:
        ExchangeError: there is nothing like that.
    """
    table, numbers, bounds, keys, out = read
    shards = [tails[shard].shard for shard in numbers]
    try:
        if keys is not None and out is not None:
            read_together(shards, table, bounds, keys, out)
            return out
        parts = [_lent(shard, table, end - begin) for shard, (begin, end) in zip(shards, pairwise(bounds), strict=True)]
    except KeyError:
        raise ExchangeError(f"shards {list(numbers)} have nothing like that of table {table}.") from None
    if out is None:
        (values,) = parts
        return values
    for values, begin in zip(parts, bounds[:-1], strict=True):
        out[begin : begin + len(values)].copy_(values)
    return out


def _lent(shard: Shard, table: int, size: int) -> Tensor:
    values = shard.lend(table)
    if len(values) != size:
        raise ExchangeError(
            f"a read asks for {size} elements of table {table} in shard {shard.number}, which has {len(values)} of it."
        )
    return values


def shares_of(clock: int, replicas: Sequence[Replica]) -> list[Tensor]:
    """Return what shards know of the norm of a clock's gradient: stages ([n] int64) and values ([n] float64)."""
    shares = [replica.shard.share(clock) for replica in replicas]
    stages = torch.tensor([share.stage for share in shares])
    return [stages, torch.tensor([share.value for share in shares], dtype=torch.float64)]


def committed(replicas: Mapping[int, Replica], positions: Mapping[int, int]) -> bool:
    """Return whether shards are on all their replicas up to these positions."""
    return all(replica.committed >= positions[shard] for shard, replica in replicas.items())
