"""An update of one shard as servers keep it and hand it on: still compressed as the worker sent it.

Replicas decode and apply the same bytes, so they agree bit for bit, and what was compressed crosses the wire compressed
between servers too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.compress.names import decode
from paceline.exchange.job import Job, SparseTable, Table
from paceline.exchange.messages import Payload, Slice, columns, unpacked
from paceline.exchange.shard.together import RowPush, RowsOfShards
from paceline.exchange.updates import Part, Update
from paceline.exchange.wire.frame import Frame


class Coded(NamedTuple):
    """What an entry has for one table.

    Attributes:
        table: its index.
        codec: that the values went through; 0: none.
        size: elements of a dense table, or rows.
        tensors: keys first, for rows; then the values, or what the codec made of them.
    """

    table: int
    codec: int
    size: int
    tensors: tuple[Tensor, ...]


class Entry(NamedTuple):
    """An update of a shard, see `updates.Update`.

    Attributes:
        position: that it has in the shard; 0 before it is applied.
        parts: by table.
        borrowed: the tensors are a connection's memory, and change with its next message.
    """

    shard: int
    position: int
    worker: int
    sequence: int
    tasks: tuple[int, ...]
    read: int
    weight: float
    parts: tuple[Coded, ...]
    borrowed: bool = True

    def update(self, job: Job) -> Update:
        """Decode it.

        Raises:
            ExchangeError: a table or codec that there is not, or tensors that do not fit it.
        """
        parts = tuple([_decoded(part, job) for part in self.parts])
        return Update(self.worker, self.sequence, self.tasks, self.read, self.weight, parts)

    def kept(self, position: int) -> Entry:
        """Return it as it is kept once applied: with its position, and with memory of its own."""
        if not self.borrowed:
            return self._replace(position=position)
        parts = (part._replace(tensors=tuple(tensor.clone() for tensor in part.tensors)) for part in self.parts)
        return self._replace(position=position, parts=tuple(parts), borrowed=False)

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors)


def _decoded(part: Coded, job: Job) -> Part:
    if not 0 <= part.table < len(job.tables):
        raise ExchangeError(f"there is no table {part.table}: the job has tables 0 to {len(job.tables) - 1}.")
    table = job.tables[part.table]
    rows = isinstance(table, SparseTable)
    keys = part.tensors[0] if rows else None
    coded = part.tensors[1:] if rows else part.tensors
    if part.codec:
        return Part(part.table, keys, _opened(part, table, keys, coded))
    if len(coded) != 1:
        raise ExchangeError(f"an update of table {table.name} came with {len(coded)} tensors of values; it has one.")
    return Part(part.table, keys, coded[0])


def _opened(part: Coded, table: Table, keys: Tensor | None, coded: Sequence[Tensor]) -> Tensor:
    """Return the values that a codec was given."""
    if isinstance(table, SparseTable):
        there, width = len(keys) if keys is not None else 0, [table.width]
    else:
        there, width = table.count, []
    if part.size > there:
        raise ExchangeError(f"an update of table {table.name} is said to be of {part.size} values of {there}.")
    return decode(part.codec, coded, (part.size, *width), getattr(torch, table.dtype))


def pushed(frame: Frame, job: Job, *, borrowed: bool) -> list[Entry]:
    """Read a PUSH: an entry for each shard that it names.

    Raises:
        ExchangeError: it is none.
    """
    try:
        tasks, reads, rest = _addressed(frame.numbers)
        payloads = unpacked(rest, frame.tensors)
        parts: dict[int, list[Coded]] = {shard: [] for shard in reads}
        for payload in payloads:
            for shard, part in _sliced(payload, job):
                parts[shard].append(part)
    except (ValueError, KeyError, IndexError) as error:
        raise ExchangeError(f"a push of worker {frame.worker} cannot be read: {error!r}") from error
    return [
        Entry(shard, 0, frame.worker, frame.sequence, tasks, read, frame.weight, tuple(parts[shard]), borrowed)
        for shard, read in reads.items()
    ]


def rows_pushed(frame: Frame, job: Job) -> RowPush | None:
    """Read a PUSH that is of rows as they are, and simple; None: it is another, or none."""
    try:
        tasks, reads, rest = _addressed(frame.numbers)
        rows = []
        for given in columns(rest, frame.tensors):
            bounds = given.bounds()
            if given.codec or bounds is None or len(given.tensors) != 2:
                return None
            rows.append(RowsOfShards(given.table, given.shards, bounds, *given.tensors))
    except (ValueError, IndexError):
        return None  # `pushed` says what is wrong
    push = RowPush(frame.worker, frame.sequence, tasks, reads, tuple(rows))
    return push if push.is_simple(job) else None


def _addressed(numbers: NDArray[np.int64]) -> tuple[tuple[int, ...], dict[int, int], NDArray[np.int64]]:
    """Return the tasks of a push, the position that was read of each shard, and the payloads' numbers."""
    count = int(numbers[0])
    shards = int(numbers[1 + count])
    at = 2 + count
    if count < 0 or shards < 0 or at + 2 * shards > len(numbers):
        raise ValueError("its numbers end too early")
    pairs: list[int] = numbers[at : at + 2 * shards].tolist()
    reads = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return tuple(numbers[1 : 1 + count].tolist()), reads, numbers[at + 2 * shards :]


def _sliced(payload: Payload, job: Job) -> Iterable[tuple[int, Coded]]:
    """Return what a payload has for each of its shards."""
    table, codec, slices, tensors = payload
    if not 0 <= table < len(job.tables):
        raise ValueError(f"there is no table {table}")
    rows = isinstance(job.tables[table], SparseTable)
    for _, begin, end in slices:
        if not 0 <= begin <= end:
            raise ValueError(f"a slice from {begin} to {end}")
    keys = cut(tensors[0], slices) if rows else ()
    coded = tensors[1:] if rows else tensors
    if codec:
        each = len(coded) // max(1, len(slices))
        held: Iterable[tuple[Tensor, ...]] = [coded[each * i : each * (i + 1)] for i in range(len(slices))]
    else:
        held = zip(cut(coded[0], slices), strict=True)
    if not rows:
        return [
            (shard, Coded(table, codec, end - begin, its))
            for (shard, begin, end), its in zip(slices, held, strict=True)
        ]
    return [
        (shard, Coded(table, codec, end - begin, (its_keys, *its)))
        for (shard, begin, end), its_keys, its in zip(slices, keys, held, strict=True)
    ]


def cut(values: Tensor, slices: Sequence[Slice]) -> Sequence[Tensor]:
    """Return slices of a tensor; in one call where they lie one after the other."""
    sizes = [part.end - part.begin for part in slices]
    begins = [0, *accumulate(sizes)]
    whole = begins.pop() == values.shape[0] and min(sizes, default=0) >= 0
    if whole and begins == [part.begin for part in slices]:
        return values.split_with_sizes(sizes)
    return [values[part.begin : part.end] for part in slices]


def forwarded(entries: Sequence[Entry], epoch: int) -> Frame:
    """Return entries as a frame, without its kind; `received` reads it."""
    numbers: list[int] = []
    tensors: list[Tensor] = []
    for entry in entries:
        weight = int(np.float64(entry.weight).view(np.int64))
        numbers += (entry.shard, entry.position, entry.worker, entry.sequence, entry.read, weight)
        numbers += (len(entry.tasks), *entry.tasks, len(entry.parts))
        for part in entry.parts:
            numbers += (part.table, part.codec, part.size, len(part.tensors))
            tensors += part.tensors
    return Frame(0, epoch=epoch, numbers=np.array(numbers, dtype=np.int64), tensors=tensors)


def received(frame: Frame, *, borrowed: bool) -> list[Entry]:
    """Read what `forwarded` made."""
    numbers = iter(frame.numbers.tolist())
    tensors = iter(frame.tensors)
    entries = []
    for shard in numbers:
        position, worker, sequence, read, weight, count = (next(numbers) for _ in range(6))
        tasks = tuple(next(numbers) for _ in range(count))
        parts = []
        for _ in range(next(numbers)):
            table, codec, rows, held = (next(numbers) for _ in range(4))
            parts.append(Coded(table, codec, rows, tuple(next(tensors) for _ in range(held))))
        counts = float(np.int64(weight).view(np.float64))
        entries.append(Entry(shard, position, worker, sequence, tasks, read, counts, tuple(parts), borrowed))
    return entries
