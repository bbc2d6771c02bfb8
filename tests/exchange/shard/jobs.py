"""Small jobs, updates drawn from their task, and comparison to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.layout import shards_of
from paceline.exchange.shard.shard import Shard, ShardState
from paceline.exchange.updates import Part, Update

DENSE, ROWS = 0, 1
KEYS = 400
ADAGRAD = Rule("adagrad", {"lr": 0.1})


def job(
    dense: str = "bsp",
    rows: str = "bsp",
    *,
    pieces: int = 3,
    shards: int = 2,
    dtype: str = "float32",
    rule: Rule = ADAGRAD,
    damp_stale: bool = False,
) -> Job:
    return Job(
        (
            DenseTable("weight", (10, 7), dtype, rule, Consistency.parse(dense)),
            SparseTable("rows", 3, dtype, rule, Consistency.parse(rows), Initializer("normal", 0.1)),
        ),
        shards=shards,
        pieces=pieces,
        seed=5,
        damp_stale=damp_stale,
    )


def begun(job: Job, number: int = 0) -> Shard:
    shard = Shard(job, number)
    for index in shard.tables:
        if isinstance(job.tables[index], DenseTable):
            shard.fill(index, torch.linspace(-1, 1, shard.read(index).numel()))
    return shard


def keys_of(shard: Shard, numbers: Iterable[int]) -> torch.Tensor:
    """Those of `numbers` that are keys of the shard."""
    keys = np.array(list(numbers), dtype=np.int64)
    return torch.from_numpy(keys[shards_of(keys, shard.job.shards) == shard.number])


def parts(shard: Shard, seed: int, tables: Sequence[int] = (DENSE, ROWS)) -> tuple[Part, ...]:
    """What somebody computed: drawn from `seed`, and from what is in the shard, so that the order matters."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for table in tables:
        dtype = getattr(torch, shard.job.tables[table].dtype)
        if table in shard.tables and isinstance(shard.job.tables[table], DenseTable):
            values = shard.read(table).clone()
            noise = torch.randn(values.shape, generator=draw, dtype=torch.float64).to(dtype)
            found.append(Part(table, None, noise + values))
        elif table in shard.tables:
            chosen = torch.randperm(KEYS, generator=draw)[:20].tolist()
            keys = keys_of(shard, chosen)
            rows = torch.empty(len(keys), 3, dtype=dtype)
            shard.read_rows(table, keys, rows)
            found.append(
                Part(table, keys, torch.randn(rows.shape, generator=draw, dtype=torch.float64).to(dtype) + rows)
            )
    return tuple(found)


def update(
    shard: Shard, task: int, *, worker: int = 1, sequence: int | None = None, weight: float = 1.0, read: int = -1
) -> Update:
    return Update(worker, task + 1 if sequence is None else sequence, (task,), read, weight, parts(shard, task))


def assert_same(one: ShardState, other: ShardState) -> None:
    assert one.meta == other.meta
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype, name
        assert torch.equal(tensor, other.tensors[name]), name


def tables_of(shard: Shard) -> dict[str, torch.Tensor]:
    """Tables and what rules keep, without who did what; rows by rising keys."""
    found = {}
    for index in shard.tables:
        state = dict(shard.table(index).state())
        if "keys" in state:
            order = torch.argsort(state["keys"])
            state = {name: tensor[order] for name, tensor in state.items()}
        found |= {f"{index}.{name}": tensor.clone() for name, tensor in state.items()}
    return found


def assert_equal_tables(one: Shard, other: Shard) -> None:
    left, right = tables_of(one), tables_of(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
