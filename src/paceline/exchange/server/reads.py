"""What a read takes out of a shard, and whether anybody may see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.server.replica import Replica
from paceline.exchange.server.requests import Read
from paceline.exchange.shard.shard import Shard


def value_of(read: Read, shard: Shard) -> Tensor:
    """Return what is asked for, where it was asked for or lent.

    Raises:
        ExchangeError: there is nothing like that.
    """
    try:
        if read.keys is not None and read.out is not None:
            shard.read_rows(read.table, read.keys, read.out)
            return read.out
        values = shard.lend(read.table)
    except KeyError:
        raise ExchangeError(f"shard {read.shard} has nothing like that of table {read.table}.") from None
    if len(values) != read.size:
        raise ExchangeError(
            f"a read asks for {read.size} elements of table {read.table} in shard {read.shard}, which has "
            f"{len(values)} of it."
        )
    return values if read.out is None else read.out.copy_(values)


def shares_of(clock: int, replicas: Sequence[Replica]) -> list[Tensor]:
    """Return what shards know of the norm of a clock's gradient: stages ([n] int64) and values ([n] float64)."""
    shares = [replica.shard.share(clock) for replica in replicas]
    stages = torch.tensor([share.stage for share in shares])
    return [stages, torch.tensor([share.value for share in shares], dtype=torch.float64)]


def committed(replicas: Mapping[int, Replica], positions: Mapping[int, int]) -> bool:
    """Return whether shards are on all their replicas up to these positions."""
    return all(replica.committed >= positions[shard] for shard, replica in replicas.items())
