"""Hogwild's memory from a snapshot, and as one: read by the same means, and gone on from with servers or without."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.exchange.hogwild.layout import columns
from paceline.exchange.hogwild.memory import Memory
from paceline.exchange.hogwild.rows import SharedRows
from paceline.exchange.job import DenseTable, Job, SparseTable
from paceline.exchange.layout import dense_ranges, shards_of
from paceline.exchange.shard.manifest import Manifest
from paceline.exchange.shard.shard import Shard, ShardState
from paceline.exchange.shard.snapshot import Taken, load_shard, write_shard
from paceline.exchange.table.rules import rule_of


class _Held(NamedTuple):
    """An array of a dense table, as one shard has it: these slices, one after the other."""

    name: str
    slices: list[slice]
    array: NDArray[Any]


def begin(path: Path, job: Job, snapshot: Path, *, rows: int = 1 << 20) -> Memory:
    """Make the memory of a job, as a snapshot has it.

    Args:
        path: of its file.
        job: what is kept.
        snapshot: directory of it; `shard.whole.write_initial` makes that of what a job begins with.
        rows: how many each sparse table may have; those that are not made take 8 to 16 bytes each.

    Raises:
        ExchangeError: the snapshot is damaged, of another job, or has more rows; or there is no room.
    """
    return Memory.create(path, job, partial(_fill, snapshot), rows)


def write_snapshot(memory: Memory, snapshots: Path, number: int, clock: int) -> None:
    """Write what is in the memory as a snapshot; exact while no worker pushes.

    Args:
        memory: to write.
        snapshots: directory of snapshots.
        number: of this one.
        clock: all tasks of clocks below it were done, and none beyond.

    Raises:
        ExchangeError: it cannot be written; the snapshots before are kept.
    """
    files = {shard: write_part(memory, snapshots, number, clock, shard) for shard in range(memory.job.shards)}
    Manifest(number, clock, clock * memory.job.pieces, 0, files).write(snapshots / str(number))


def write_part(memory: Memory, snapshots: Path, number: int, clock: int, shard: int) -> str:
    """Write what a shard would hold into a snapshot; returns the name that a manifest has for it. See `write_snapshot`.

    Raises:
        ExchangeError: it cannot be written.
    """
    job = memory.job
    meta = Shard(job, shard).state().meta
    meta["clocks"] |= {"floor": clock * job.pieces, "reached": [[clock, 0]]}
    return write_shard(snapshots, job, Taken(number, shard, ShardState(_tensors(memory, shard), meta), None))


def _fill(snapshot: Path, memory: Memory) -> None:
    for shard in range(memory.job.shards):
        tensors = load_shard(snapshot, memory.job, shard).state().tensors
        for held in _dense(memory, shard):
            at = 0
            for part in held.slices:
                size = part.stop - part.start
                held.array[part] = tensors[held.name].numpy()[at : at + size]
                at += size
        for index, table in _sparse(memory):
            keys = tensors[f"table.{index}.keys"].numpy()
            kept = [tensors[f"table.{index}.{name}"].numpy().reshape(-1, size) for name, size in columns(table).items()]
            SharedRows(memory, index).put(keys, kept)


def _tensors(memory: Memory, shard: int) -> dict[str, Tensor]:
    """Return what a shard would have of the tables."""
    found = {
        held.name: torch.from_numpy(np.concatenate([held.array[part] for part in held.slices]))
        for held in _dense(memory, shard)
    }
    for index, table in _sparse(memory):
        keys, kept = SharedRows(memory, index).all()
        mine = shards_of(keys, memory.job.shards) == shard
        found[f"table.{index}.keys"] = torch.from_numpy(keys[mine])
        for name, column in zip(columns(table), kept, strict=True):
            chosen = column[mine, 0] if name in rule_of(table.rule).rows else column[mine]
            found[f"table.{index}.{name}"] = torch.from_numpy(chosen.copy())
    return found


def _dense(memory: Memory, shard: int) -> Iterator[_Held]:
    slices: dict[int, list[slice]] = {}
    for held in dense_ranges(memory.job):
        if held.shard == shard:
            slices.setdefault(held.table, []).append(slice(held.start, held.stop))
    for index, parts in slices.items():
        table = memory.job.tables[index]
        assert isinstance(table, DenseTable)
        rule = rule_of(table.rule)
        for name in ("values", *rule.elements, *rule.rows):
            whole = [slice(0, 1)] if name in rule.rows else parts  # a number of the whole range, the same in all shards
            yield _Held(f"table.{index}.{name}", whole, memory.array(f"{index}.{name}"))


def _sparse(memory: Memory) -> Iterator[tuple[int, SparseTable]]:
    for index, table in enumerate(memory.job.tables):
        if isinstance(table, SparseTable):
            yield index, table
