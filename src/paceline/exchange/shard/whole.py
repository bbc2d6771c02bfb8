"""All tables at once, as a module has them: the snapshot that a job begins with, and what is read out of any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ExchangeError, nearest
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.layout import DenseRange, dense_ranges
from paceline.exchange.shard.manifest import Manifest
from paceline.exchange.shard.shard import Shard
from paceline.exchange.shard.snapshot import Taken, load_shard, write_shard


@dataclass(frozen=True)
class Tables:
    """What all shards hold together.

    Attributes:
        dense: by name, in their shapes.
        keys: of sparse tables by name: [n] int64, rising.
        rows: their values: [n, width].
    """

    dense: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


def write_initial(snapshots: Path, job: Job, dense: Mapping[str, Tensor]) -> None:
    """Write snapshot 0: what a job begins with. Sparse tables begin without rows.

    Args:
        snapshots: directory of snapshots.
        job: what is kept.
        dense: values of all dense tables, by name.

    Raises:
        ExchangeError: a table is missing, unknown or of another shape, or the disk is full.
    """
    _check(job, dense)
    ranges = dense_ranges(job)
    directory = snapshots / "0"
    files = {}
    for number in range(job.shards):
        shard = Shard(job, number)
        for index, held in _by_table(ranges, number).items():
            flat = dense[job.tables[index].name].detach().reshape(-1)
            shard.fill(index, torch.cat([flat[part.start : part.stop] for part in held]))
        files[number] = write_shard(snapshots, job, Taken(0, number, shard.state(), None))
    Manifest(0, 0, 0, 0, files).write(directory)


def read_tables(directory: Path, job: Job) -> Tables:
    """Read all tables of the snapshot in `directory`.

    Raises:
        ExchangeError: the snapshot is not whole, damaged, or of another job.
    """
    return gather(job, (load_shard(directory, job, number) for number in range(job.shards)))


def gather(job: Job, shards: Iterable[Shard]) -> Tables:
    """Return what shards hold together; all shards of a job, one after the other."""
    ranges = dense_ranges(job)
    tables = Tables()
    flat = {}
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for index, table in enumerate(job.tables):
        if isinstance(table, DenseTable):
            tables.dense[table.name] = torch.empty(table.shape, dtype=getattr(torch, table.dtype))
            flat[index] = tables.dense[table.name].view(-1)
        else:
            found[index] = []
    for shard in shards:
        for index, held in _by_table(ranges, shard.number).items():
            parts = torch.split(shard.read(index), [part.count for part in held])
            for part, values in zip(held, parts, strict=True):
                flat[index][part.start : part.stop] = values
        for index, rows in found.items():
            state = shard.table(index).state()
            rows.append((state["keys"], state["values"]))
    for index, rows in found.items():
        name = job.tables[index].name
        keys = torch.cat([keys for keys, _ in rows])
        order = torch.argsort(keys)
        tables.keys[name], tables.rows[name] = keys[order], torch.cat([values for _, values in rows])[order]
    return tables


def _by_table(ranges: tuple[DenseRange, ...], shard: int) -> dict[int, list[DenseRange]]:
    """Return the ranges of a shard, by table, in the order in which the shard has them."""
    found: dict[int, list[DenseRange]] = {}
    for part in ranges:
        if part.shard == shard:
            found.setdefault(part.table, []).append(part)
    return found


def _check(job: Job, dense: Mapping[str, Tensor]) -> None:
    wanted = {table.name: table for table in job.tables if isinstance(table, DenseTable)}
    for name in dense:
        if name not in wanted:
            raise ExchangeError(f"the job has no dense table '{name}'.{nearest(name, wanted)}")
    for name, table in wanted.items():
        given = tuple(dense[name].shape) if name in dense else None
        if given != table.shape:
            raise ExchangeError(
                f"the dense table {name} is of {table.shape}, and its values are "
                f"{'missing' if given is None else f'of {given}'}."
            )
