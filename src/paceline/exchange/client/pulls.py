"""Reads: of dense tables, and of rows. Tails answer them; values go straight to where they are wanted, if they can."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.client.errands import Errand
from paceline.exchange.client.routes import DenseRoutes, DenseSlice, RoutedKeys, joined, scatter
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


class Pull(Errand):
    """A read.

    Attributes:
        number: of this worker's reads, from 1.
        tables: what is read.
        clock: as which it may be read.
        positions: of each shard that answered.
        rows: how many are read.
    """

    rows = 0

    def __init__(self, number: int, tables: Sequence[int], clock: int, shards: Iterable[int]) -> None:
        super().__init__(shards)
        self.number, self.tables, self.clock = number, tuple(tables), clock
        self.positions: dict[int, int] = {}

    def holder(self, view: View, shard: int) -> int:
        """The tail: what it has, all replicas have."""
        return view.tail(shard)

    @abstractmethod
    def read(self, number: int, shard: Shard) -> None:
        """Read what is wanted of a shard that is here."""

    def note(self, slices: Iterable[int], answer: Frame) -> None:
        """Note the positions of an answer. slices: the shard of each slice that was asked for."""
        shards = list(slices)
        if len(shards) != len(answer.numbers):
            raise ExchangeError(f"a server gave {len(answer.numbers)} positions for {len(shards)} slices.")
        for shard, position in zip(shards, answer.numbers.tolist(), strict=True):
            if self.positions.setdefault(shard, position) != position:
                raise ExchangeError(f"a server read shard {shard} at two positions for one request.")


class DensePull(Pull):
    """A read of dense tables.

    Args:
        out: tensors of their shapes, contiguous.
    """

    def __init__(
        self, number: int, tables: Sequence[int], out: Sequence[Tensor], clock: int, routes: DenseRoutes
    ) -> None:
        self._slices: dict[int, list[tuple[DenseSlice, Tensor]]] = {}
        for table, values in zip(tables, out, strict=True):
            flat = values.detach().view(-1)
            for held in routes.of(table):
                self._slices.setdefault(held.shard, []).append((held, flat))
        super().__init__(number, tables, clock, self._slices)

    def _of(self, shards: Sequence[int]) -> Iterator[tuple[DenseSlice, Tensor]]:
        return (held for shard in shards for held in self._slices[shard])

    def frame(self, shards: Sequence[int]) -> Frame:
        """See `Errand`. A payload for each table and shard: nobody has to put values together, or apart."""
        payloads = (Payload(held.table, 0, (Slice(held.shard, 0, held.count),)) for held, _ in self._of(shards))
        return Frame(Kind.PULL, clock=self.clock, numbers=np.asarray(packed(payloads), dtype=np.int64))

    def room(self, shards: Sequence[int], metas: Sequence[Meta]) -> Sequence[Tensor] | None:
        """See `Errand`."""
        wanted = list(self._of(shards))
        if [(meta.dtype, meta.shape) for meta in metas] != [(flat.dtype, (held.count,)) for held, flat in wanted]:
            raise ExchangeError("a server answered a read with other types or sizes than those of the tables.")
        if any(len(held.ranges) > 1 for held, _ in wanted):
            return None
        return [held.of(flat) for held, flat in wanted]

    def take(self, shards: Sequence[int], answer: Frame) -> None:
        """See `Errand`."""
        wanted = list(self._of(shards))
        for (held, flat), values in zip(wanted, answer.tensors, strict=True):
            if len(held.ranges) > 1 or values.data_ptr() != flat[held.ranges[0][0] :].data_ptr():
                held.put(values, flat)
        self.note((held.shard for held, _ in wanted), answer)

    def read(self, number: int, shard: Shard) -> None:
        """See `Pull`."""
        for held, flat in self._slices[number]:
            held.put(shard.read(held.table), flat)


class RowsPull(Pull):
    """A read of rows.

    Args:
        keys: as they are in shards.
        out: [n, width], contiguous; rows in the order in which keys were given.
    """

    def __init__(self, number: int, table: int, keys: RoutedKeys, out: Tensor, clock: int) -> None:
        super().__init__(number, (table,), clock, keys.shards)
        self._keys, self._out, self.rows = keys, out.detach(), len(keys.keys)

    def frame(self, shards: Sequence[int]) -> Frame:
        """See `Errand`."""
        slices = rows_slices(self._keys, shards)
        keys = joined(self._keys.keys, self._keys.runs(shards))
        numbers = np.asarray(packed([Payload(self.tables[0], 0, slices, (keys,))]), dtype=np.int64)
        return Frame(Kind.PULL, clock=self.clock, numbers=numbers, tensors=(keys,))

    def take(self, shards: Sequence[int], answer: Frame) -> None:
        """See `Errand`."""
        order = joined(self._keys.order, self._keys.runs(shards))
        (values,) = answer.tensors
        if values.dtype != self._out.dtype or values.shape != (len(order), *self._out.shape[1:]):
            raise ExchangeError("a server answered a read of rows with another type or shape than that of the table.")
        scatter(values, order, self._out)
        self.note(shards, answer)

    def read(self, number: int, shard: Shard) -> None:
        """See `Pull`."""
        begin, end = self._keys.bounds[number : number + 2]
        values = self._out.new_empty((end - begin, *self._out.shape[1:]))
        shard.read_rows(self.tables[0], self._keys.keys[begin:end], values)
        scatter(values, self._keys.order[begin:end], self._out)


def rows_slices(keys: RoutedKeys, shards: Sequence[int]) -> tuple[Slice, ...]:
    """Return the slices of these shards' keys when they lie one after the other; shards without a key have none."""
    slices, taken = [], 0
    for shard in shards:
        count = keys.bounds[shard + 1] - keys.bounds[shard]
        if count:
            slices.append(Slice(shard, taken, taken + count))
        taken += count
    return tuple(slices)
