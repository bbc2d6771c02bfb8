"""Reads of dense tables and of rows. Tails answer them; values go straight to where they are wanted, if they can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.client.errands import Errand
from paceline.exchange.client.routes import DenseRoutes, DenseSlice, RoutedKeys, joined, routed, scatter
from paceline.exchange.interface import RowsWanted
from paceline.exchange.job import DenseTable, Job, SparseTable, Table
from paceline.exchange.messages import Kind, Payload, Slice, packed
from paceline.exchange.view import View
from paceline.exchange.wire.frame import Frame, Meta


class Shard(Protocol):
    """What is asked of `shard.shard.Shard`, to read it where it is."""

    def read(self, table: int) -> Tensor:
        """Return the elements of a dense table."""
        ...

    def read_rows(self, table: int, keys: Tensor, out: Tensor) -> None:
        """Read rows into `out`."""
        ...


class Wanted(Protocol):
    """What is read of some tables."""

    @property
    def tables(self) -> Sequence[int]:
        """Which tables."""
        ...

    @property
    def rows(self) -> int:
        """How many rows."""
        ...

    @property
    def shards(self) -> Sequence[int]:
        """Shards that have something of it."""
        ...

    def payloads(self, shards: Sequence[int]) -> list[Payload]:
        """Return the question for some shards; each payload is answered by one tensor."""
        ...

    def room(self, shards: Sequence[int], metas: Sequence[Meta]) -> list[Tensor] | None:
        """Return where the answer goes; None: wherever."""
        ...

    def take(self, shards: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Take the answer."""
        ...

    def read(self, number: int, shard: Shard) -> None:
        """Read what is wanted of a shard that is here."""
        ...


class Dense:
    """Dense tables.

    Args:
        out: tensors of their shapes, contiguous.
    """

    rows = 0

    def __init__(self, tables: Sequence[int], out: Sequence[Tensor], routes: DenseRoutes) -> None:
        self.tables = tables
        self._slices: dict[int, list[tuple[DenseSlice, Tensor]]] = {}
        for table, values in zip(tables, out, strict=True):
            flat = values.detach().view(-1)
            for held in routes.of(table):
                self._slices.setdefault(held.shard, []).append((held, flat))

    @property
    def shards(self) -> Sequence[int]:
        """See `Wanted`."""
        return tuple(self._slices)

    def payloads(self, shards: Sequence[int]) -> list[Payload]:
        """See `Wanted`. One for each table and shard: nobody has to put values together, or apart."""
        return [Payload(held.table, 0, (Slice(held.shard, 0, held.count),)) for held, _ in self._of(shards)]

    def room(self, shards: Sequence[int], metas: Sequence[Meta]) -> list[Tensor] | None:
        """See `Wanted`."""
        wanted = list(self._of(shards))
        if [(meta.dtype, meta.shape) for meta in metas] != [(flat.dtype, (held.count,)) for held, flat in wanted]:
            raise ExchangeError("a server answered a read with other types or sizes than those of the tables.")
        if any(len(held.ranges) > 1 for held, _ in wanted):
            return None
        return [held.of(flat) for held, flat in wanted]

    def take(self, shards: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """See `Wanted`."""
        for (held, flat), values in zip(self._of(shards), tensors, strict=True):
            if len(held.ranges) > 1 or values.data_ptr() != flat[held.ranges[0][0] :].data_ptr():
                held.put(values, flat)

    def read(self, number: int, shard: Shard) -> None:
        """See `Wanted`."""
        for held, flat in self._of((number,)):
            held.put(shard.read(held.table), flat)

    def _of(self, shards: Sequence[int]) -> Iterator[tuple[DenseSlice, Tensor]]:
        return (held for shard in shards for held in self._slices.get(shard, ()))


class SomeRows:
    """Rows of a sparse table.

    Args:
        keys: as they are in shards.
        out: [n, width], contiguous; rows in the order in which keys were given.
    """

    def __init__(self, table: int, keys: RoutedKeys, out: Tensor) -> None:
        self.tables = (table,)
        self.rows = len(keys.keys)
        self._keys, self._out = keys, out.detach()

    @property
    def shards(self) -> Sequence[int]:
        """See `Wanted`."""
        return self._keys.shards

    def payloads(self, shards: Sequence[int]) -> list[Payload]:
        """See `Wanted`."""
        runs = self._keys.runs(shards)
        if not runs:
            return []
        slices = rows_slices(self._keys, shards)
        return [Payload(self.tables[0], 0, slices, (joined(self._keys.keys, runs),))]

    def room(self, shards: Sequence[int], metas: Sequence[Meta]) -> list[Tensor] | None:
        """See `Wanted`: rows come in another order than that in which they are wanted."""
        return None

    def take(self, shards: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """See `Wanted`."""
        runs = self._keys.runs(shards)
        if not runs:
            return
        order = joined(self._keys.order, runs)
        (values,) = tensors
        if values.dtype != self._out.dtype or values.shape != (len(order), *self._out.shape[1:]):
            raise ExchangeError("a server answered a read of rows with another type or shape than that of the table.")
        scatter(values, order, self._out)

    def read(self, number: int, shard: Shard) -> None:
        """See `Wanted`."""
        begin, end = self._keys.bounds[number : number + 2]
        if begin < end:
            values = self._out.new_empty((end - begin, *self._out.shape[1:]))
            shard.read_rows(self.tables[0], self._keys.keys[begin:end], values)
            scatter(values, self._keys.order[begin:end], self._out)


def wanted(
    job: Job, routes: DenseRoutes, tables: Sequence[int], out: Sequence[Tensor], rows: RowsWanted
) -> list[Wanted]:
    """Return what is read.

    Raises:
        ExchangeError: it does not fit the tables.
    """
    for table, values in zip(tables, out, strict=True):
        _check_dense(job.tables[table], values)
    found: list[Wanted] = [Dense(tables, out, routes)] if tables else []
    for table, (keys, values) in rows.items():
        _check_rows(job.tables[table], keys, values)
        found.append(SomeRows(table, routed(keys, job.shards), values))
    return found


def _check_dense(table: Table, out: Tensor) -> None:
    if not isinstance(table, DenseTable):
        raise ExchangeError(f"{table.name} is a table of rows: it cannot be read whole.")
    if out.shape != table.shape or out.dtype != getattr(torch, table.dtype) or not out.is_contiguous():
        raise ExchangeError(
            f"{table.name} is {list(table.shape)} of {table.dtype}, and is read into a contiguous tensor of that; "
            f"given is {list(out.shape)} of {str(out.dtype).removeprefix('torch.')}."
        )


def _check_rows(table: Table, keys: Tensor, out: Tensor) -> None:
    if not isinstance(table, SparseTable):
        raise ExchangeError(f"{table.name} is a dense table: it is read whole.")
    shape, dtype = (len(keys), table.width), getattr(torch, table.dtype)
    if keys.dtype != torch.int64 or out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ExchangeError(
            f"rows of {table.name}: {len(keys)} keys of {keys.dtype} into {list(out.shape)} of {out.dtype}; the table "
            f"has int64 keys, and rows of {table.width} {table.dtype} are read into a contiguous tensor."
        )


class Pull(Errand):
    """A read: of all that is wanted of a shard at one position.

    Attributes:
        number: of this worker's reads, from 1.
        clock: as which it may be read.
        positions: of each shard that answered.
    """

    def __init__(self, number: int, wanted: Sequence[Wanted], clock: int) -> None:
        super().__init__(shard for some in wanted for shard in some.shards)
        self.number, self.clock = number, clock
        self.positions: dict[int, int] = {}
        self._wanted = wanted
        self._questions: dict[tuple[int, ...], list[list[Payload]]] = {}

    @property
    def tables(self) -> list[int]:
        """What is read."""
        return [table for some in self._wanted for table in some.tables]

    @property
    def rows(self) -> int:
        """How many rows are read."""
        return sum(some.rows for some in self._wanted)

    def holder(self, view: View, shard: int) -> int:
        """The tail: what it has, all replicas have."""
        return view.tail(shard)

    def frame(self, shards: Sequence[int]) -> Frame:
        """See `Errand`."""
        each = self._questions[tuple(shards)] = [some.payloads(shards) for some in self._wanted]
        payloads = [payload for its in each for payload in its]
        keys = [tensor for payload in payloads for tensor in payload.tensors]
        return Frame(Kind.PULL, clock=self.clock, numbers=np.asarray(packed(payloads), dtype=np.int64), tensors=keys)

    def room(self, shards: Sequence[int], metas: Sequence[Meta]) -> Sequence[Tensor] | None:
        """See `Errand`: somewhere for all of it if some of it can go straight to where it is wanted."""
        each, left = self._questions[tuple(shards)], iter(metas)
        count = sum(map(len, each))
        if len(metas) != count:
            raise ExchangeError(f"a server answered a read of {count} payloads with {len(metas)} tensors.")
        rooms: list[Tensor] = []
        placed = False
        for some, payloads in zip(self._wanted, each, strict=True):
            its = list(islice(left, len(payloads)))
            room = some.room(shards, its) if its else None
            placed |= room is not None
            rooms += [torch.empty(meta.shape, dtype=meta.dtype) for meta in its] if room is None else room
        return rooms if placed else None

    def take(self, shards: Sequence[int], answer: Frame) -> None:
        """See `Errand`."""
        left = iter(answer.tensors)
        asked: list[int] = []
        for some, payloads in zip(self._wanted, self._questions.pop(tuple(shards)), strict=True):
            some.take(shards, list(islice(left, len(payloads))))
            asked += [part.shard for payload in payloads for part in payload.slices]
        if len(asked) != len(answer.numbers):
            raise ExchangeError(f"a server gave {len(answer.numbers)} positions for {len(asked)} slices.")
        for shard, position in zip(asked, answer.numbers.tolist(), strict=True):
            if self.positions.setdefault(shard, position) != position:
                raise ExchangeError(f"a server read shard {shard} at two positions for one request.")

    def read(self, number: int, shard: Shard) -> None:
        """Read what is wanted of a shard that is here."""
        for some in self._wanted:
            some.read(number, shard)


def rows_slices(keys: RoutedKeys, shards: Sequence[int]) -> tuple[Slice, ...]:
    """Return the slices of these shards' keys when they lie one after the other; shards without a key have none."""
    slices, taken = [], 0
    for shard in shards:
        count = keys.bounds[shard + 1] - keys.bounds[shard]
        if count:
            slices.append(Slice(shard, taken, taken + count))
        taken += count
    return tuple(slices)
