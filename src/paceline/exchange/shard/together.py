"""A push of rows for many shards at once: one call updates their tables, and each shard counts only.

What a push needs beyond that is done shard by shard (`Shard.check` and `Shard.apply`), and so is what may be wrong:
there it is decided and said. Where both can be taken, both give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.exchange.job import Job, SparseTable
from paceline.exchange.shard.shard import Shard
from paceline.exchange.table.route import stray_of_several
from paceline.exchange.table.sparse import Sparse
from paceline.exchange.updates import Applied


class RowsOfShards(NamedTuple):
    """Gradients of rows of one table.

    Attributes:
        table: its index.
        shards: that have some of them, in rising order.
        bounds: rows of `shards[i]` are from `bounds[i]` to `bounds[i + 1]`; from 0, rising.
        keys: [n] int64.
        values: [n, width].
    """

    table: int
    shards: Sequence[int]
    bounds: Sequence[int]
    keys: Tensor
    values: Tensor


class RowPush(NamedTuple):
    """An update of several shards, see `updates.Update`.

    Attributes:
        reads: of each shard the position that was read.
        rows: each of another table.
    """

    worker: int
    sequence: int
    tasks: tuple[int, ...]
    reads: Mapping[int, int]
    rows: tuple[RowsOfShards, ...]

    def is_simple(self, job: Job) -> bool:
        """Whether it fits the tables and may be applied together, as far as that can be told without the shards."""
        tasks = self.tasks
        if job.closes_steps or job.damp_stale or job.notes_changes:
            return False
        if self.sequence < 1 or not tasks or not self.reads:
            return False
        if tasks[0] < 0 or any(one >= other for one, other in pairwise(tasks)):
            return False
        return len({given.table for given in self.rows}) == len(self.rows) and all(
            _fits(given, self.reads, job) for given in self.rows
        )


def _fits(given: RowsOfShards, reads: Mapping[int, int], job: Job) -> bool:
    index, shards, bounds, keys, values = given
    if not 0 <= index < len(job.tables) or len(bounds) != len(shards) + 1 or bounds[-1] != len(keys):
        return False
    table = job.tables[index]
    if not isinstance(table, SparseTable) or not reads.keys() >= set(shards):
        return False
    if any(one >= other for one, other in pairwise(shards)):
        return False
    if keys.dtype is not torch.int64 or keys.ndim != 1 or values.shape != (len(keys), table.width):
        return False
    return values.dtype is getattr(torch, table.dtype) and stray_of_several(keys, bounds, shards, job.shards) is None


def apply_together(shards: Mapping[int, Shard], push: RowPush) -> list[Applied] | None:
    """Apply a simple push to all of its shards; returns what became of it in each, in the order of its reads.

    None: a shard has to look closer, for it may have had the push before, or cannot take it. Nothing was changed then.
    """
    worker, sequence, tasks, reads, rows = push
    job = next(iter(shards.values())).job
    bounds = [job.tables[given.table].consistency.bound for given in rows]
    bound = min((bound for bound in bounds if bound is not None), default=None)
    if not all([shards[shard].takes(worker, sequence, tasks, read, bound) for shard, read in reads.items()]):
        return None
    touched = {shard for given in rows for shard in given.shards}
    done = [
        shards[shard].count(worker, sequence, tasks, read if shard in touched else -1) for shard, read in reads.items()
    ]
    factor = job.rate(job.clock(tasks[0]))
    for table, numbers, ends, keys, values in rows:
        if numbers:
            Sparse.update_several([shards[shard].rows(table) for shard in numbers], ends, keys, values, factor)
    return done


def read_together(shards: Sequence[Shard], table: int, bounds: Sequence[int], keys: Tensor, out: Tensor) -> None:
    """Read rows of a table in several shards; those of `shards[i]` are from `bounds[i]` to `bounds[i + 1]`.

    keys: [n] int64; out: [n, width], contiguous.

    Raises:
        KeyError: there is no such table of rows.
    """
    if shards:
        Sparse.read_several([shard.rows(table) for shard in shards], bounds, keys, out)
