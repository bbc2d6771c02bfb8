"""A push, cut up by shards once, so that whatever servers hold the shards, each gets what is its own.

What is compressed is compressed by slice, here: a slice that is sent again, in other company, is the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.client.pulls import rows_slices
from paceline.exchange.client.routes import DenseRoutes, RoutedKeys, gathered, joined, routed
from paceline.exchange.interface import Rows
from paceline.exchange.job import DenseTable, Job, SparseTable
from paceline.exchange.messages import Payload, Slice


class Compressed(Protocol):
    """What compression did so far; see `compress.feedback.Figures`."""

    @property
    def ratio(self) -> float:
        """How many times smaller."""
        ...

    @property
    def seconds(self) -> float:
        """That it took."""
        ...


class Compressor(Protocol):
    """What is asked of `compress.feedback.Compression`."""

    @property
    def figures(self) -> Compressed:
        """What it did so far."""
        ...

    def number(self, table: int) -> int:
        """The number of the codec that a table goes through; 0: none."""
        ...

    def encode(self, table: int, shard: int, values: Tensor, keys: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return what is sent of a slice, and keep what that leaves out for the next one."""
        ...


@dataclass(frozen=True)
class _Dense:
    payload: Payload
    shard: int


@dataclass(frozen=True)
class _Rows:
    """Rows of a table, sorted by shard: values as they are ([n, width]), or what a codec made of each shard's."""

    table: int
    keys: RoutedKeys
    values: Tensor | None
    codec: int
    encoded: Mapping[int, tuple[Tensor, ...]]

    def payload(self, shards: Sequence[int]) -> Payload | None:
        runs = self.keys.runs(shards)
        if not runs:
            return None
        slices = rows_slices(self.keys, shards)
        keys = joined(self.keys.keys, runs)
        if self.values is not None:
            return Payload(self.table, 0, slices, (keys, joined(self.values, runs)))
        made = (tensor for part in slices for tensor in self.encoded[part.shard])
        return Payload(self.table, self.codec, slices, (keys, *made))


class Cutter:
    """Cuts pushes of a job.

    Args:
        compression: None: values go as they are.
    """

    def __init__(self, job: Job, routes: DenseRoutes, compression: Compressor | None = None) -> None:
        self._job, self._routes, self._compression = job, routes, compression
        self._spare: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def cut(self, dense: Mapping[int, Tensor], rows: Mapping[int, Rows], keep: bool) -> Outgoing:
        """Cut gradients up.

        Args:
            dense: by table, of its shape.
            rows: by table.
            keep: whether what is given may change while the push is under way.

        Raises:
            ExchangeError: it does not fit the tables.
        """
        by_shard = [held for table, values in sorted(dense.items()) for held in self._dense(table, values, keep)]
        by_shard.sort(key=lambda held: held.shard)
        kept = (
            [values for held in by_shard if not held.payload.codec for values in held.payload.tensors] if keep else []
        )
        return Outgoing(by_shard, [self._rows(table, given) for table, given in sorted(rows.items())], kept)

    def done(self, outgoing: Outgoing) -> None:
        """A push is acknowledged: the memory that it was kept in is for later ones."""
        for values in outgoing.kept:
            self._spare.setdefault((values.dtype, len(values)), []).append(values)

    def _dense(self, table: int, values: Tensor, keep: bool) -> Iterator[_Dense]:
        held = self._job.tables[table] if table < len(self._job.tables) else None
        if not isinstance(held, DenseTable):
            raise ExchangeError(f"table {table} is not a dense one: its gradient cannot be pushed whole.")
        dtype = getattr(torch, held.dtype)
        if values.shape != held.shape or values.dtype != dtype:
            raise ExchangeError(
                f"the gradient of {held.name} is {_kind(values)}; the table is {list(held.shape)} of {held.dtype}."
            )
        flat = values.detach().reshape(-1)
        codec = 0 if self._compression is None else self._compression.number(table)
        for piece in self._routes.of(table):
            mine = piece.of(flat)
            if codec and self._compression is not None:
                tensors = self._compression.encode(table, piece.shard, mine)
            else:
                tensors = (self._copied(mine) if keep else mine,)
            yield _Dense(Payload(table, codec, (Slice(piece.shard, 0, piece.count),), tensors), piece.shard)

    def _copied(self, values: Tensor) -> Tensor:
        spare = self._spare.get((values.dtype, len(values)))
        return (spare.pop() if spare else torch.empty_like(values)).copy_(values)

    def _rows(self, table: int, given: Rows) -> _Rows:
        held = self._job.tables[table] if table < len(self._job.tables) else None
        if not isinstance(held, SparseTable):
            raise ExchangeError(f"table {table} is not a sparse one: rows cannot be pushed to it.")
        keys, values = given
        dtype = getattr(torch, held.dtype)
        if keys.dtype != torch.int64 or values.shape != (len(keys), held.width) or values.dtype != dtype:
            raise ExchangeError(
                f"rows of {held.name}: {len(keys)} keys of {keys.dtype} and values {_kind(values)}; the table takes "
                f"int64 keys and [{len(keys)}, {held.width}] of {held.dtype}."
            )
        sorted_keys = routed(keys, self._job.shards)
        ordered = gathered(values.detach(), sorted_keys.order)
        codec = 0 if self._compression is None else self._compression.number(table)
        if not codec or self._compression is None:
            return _Rows(table, sorted_keys, ordered, 0, {})
        encoded = {}
        for shard in sorted_keys.shards:
            begin, end = sorted_keys.bounds[shard], sorted_keys.bounds[shard + 1]
            encoded[shard] = self._compression.encode(table, shard, ordered[begin:end], sorted_keys.keys[begin:end])
        return _Rows(table, sorted_keys, None, codec, encoded)


class Outgoing:
    """A push, by shard.

    Args:
        dense, rows: what it has.
        kept: of the memory that it is in, what is for other pushes afterwards.
    """

    def __init__(self, dense: Sequence[_Dense], rows: Sequence[_Rows], kept: Sequence[Tensor]) -> None:
        self.kept = kept
        self._dense: dict[int, list[Payload]] = {}
        for held in dense:
            self._dense.setdefault(held.shard, []).append(held.payload)
        self._rows = rows

    def payloads(self, shards: Sequence[int]) -> list[Payload]:
        """Return what goes to the server that holds these shards (in rising order)."""
        payloads = [payload for shard in shards for payload in self._dense.get(shard, ())]
        for rows in self._rows:
            payload = rows.payload(shards)
            if payload is not None:
                payloads.append(payload)
        return payloads


def _kind(values: Tensor) -> str:
    return f"{list(values.shape)} of {values.dtype}".replace("torch.", "")
