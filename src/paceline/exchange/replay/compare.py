"""Whether two states of a shard are the same, bit for bit, and if not, where they differ first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.exchange.job import Job, SparseTable
from paceline.exchange.layout import dense_ranges
from paceline.exchange.shard.shard import ShardState
from paceline.exchange.table.sparse import KEYS


@dataclass(frozen=True)
class Difference:
    """Where two states of a shard differ first.

    Attributes:
        shard: its number.
        position: of the state that was written.
        where: the table, and its element or row.
        written, replayed: what is there.
    """

    shard: int
    position: int
    where: str
    written: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"shard {self.shard} at position {self.position}: {self.where} is {self.written} in the snapshot, and "
            f"{self.replayed} in the replay"
        )


def difference(job: Job, shard: int, written: ShardState, replayed: ShardState) -> Difference | None:
    """Return the first difference, in the order of tables; None where there is none.

    Who pushed what is left out: snapshots do not keep it for those who read them, and the log has it.
    """
    position = int(written.meta["position"])
    one, other = (_sorted_rows(job, state.tensors) for state in (written, replayed))
    for name in sorted({*one, *other}, key=_order):
        where, named = _named(job, shard, name, one)
        found = _first(one.get(name), other.get(name), named)
        if found is not None:
            at, *values = found
            return Difference(shard, position, f"{where}{at}", *values)
    for key in sorted({*written.meta, *replayed.meta} - {"sequences"}):
        values = [str(state.meta.get(key)) for state in (written, replayed)]
        if values[0] != values[1]:
            return Difference(shard, position, key, *values)
    return None


def _sorted_rows(job: Job, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the rows of each table by rising keys: the order in which they were made is no value."""
    found = dict(tensors)
    for index, table in enumerate(job.tables):
        keys = tensors.get(f"table.{index}.{KEYS}")
        if isinstance(table, SparseTable) and keys is not None:
            order = keys.argsort()
            found |= {name: held[order] for name, held in tensors.items() if name.startswith(f"table.{index}.")}
    return found


def _order(name: str) -> tuple[bool, int, bool, str]:
    """Tables in their order, keys of rows before what they have; then what waits for its step."""
    kind, number, *rest = name.split(".")
    return kind != "table", int(number) if number.isdigit() else 0, rest != [KEYS], name


def _named(job: Job, shard: int, name: str, tensors: Mapping[str, Tensor]) -> tuple[str, Callable[[int], str]]:
    """Return what a tensor is called, and how its elements are."""
    kind, number, *rest = name.split(".")
    if kind != "table":
        return name, lambda at: f", element {at}"
    index = int(number)
    table = job.tables[index]
    what = table.name if rest == ["values"] else f"{'.'.join(rest)} of {table.name}"
    if isinstance(table, SparseTable):
        keys = tensors.get(f"table.{index}.{KEYS}", torch.empty(0))
        each = max(1, tensors[name].numel() // max(1, len(keys))) if name in tensors else 1
        return what, lambda at: f", row of key {int(keys[at // each])}, element {at % each}"
    ranges = [held for held in dense_ranges(job) if (held.table, held.shard) == (index, shard)]
    elements = torch.cat([torch.arange(held.start, held.stop) for held in ranges])
    of_elements = name in tensors and tensors[name].numel() == len(elements)
    return what, lambda at: f", element {int(elements[at]) if of_elements else at}"


def _first(one: Tensor | None, other: Tensor | None, named: Callable[[int], str]) -> tuple[str, str, str] | None:
    """Return where two tensors differ first, and what is there: bit for bit, so that 0 is not -0, and NaN is itself."""
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return "", _kind(one), _kind(other)
    if not one.numel():
        return None
    bits = [held.contiguous().reshape(-1, 1).view(torch.uint8) for held in (one, other)]
    unlike = (bits[0] != bits[1]).any(dim=1)
    if not unlike.any():
        return None
    at = int(unlike.nonzero()[0])
    return named(at), repr(one.reshape(-1)[at].item()), repr(other.reshape(-1)[at].item())


def _kind(held: Tensor | None) -> str:
    return "absent" if held is None else f"{list(held.shape)} of {held.dtype}"
