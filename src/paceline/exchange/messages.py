"""What workers and servers say to each other, as frames.

A worker pulls and pushes *payloads*: what one message has for one table, of several shards. Payloads are packed into a
frame's numbers as (table, codec, tensors, slices, then shard, begin and end of each slice).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Kind(IntEnum):
    """What a frame is.

    A request that is of another epoch than the server's, or for shards that it does not have, is REFUSED, and changed
    nothing. Answers bear the number of their request.
    """

    HELLO = 1
    """Who connects; text: {"role": "worker" or "server", "id": number}. No answer."""
    PULL = 2
    """clock; numbers: payloads (codec 0). Tensors: keys of each payload that is of rows; dense ones have none. To the
    tail of each shard."""
    PULLED = 3
    """numbers: position of each slice, in order. Tensors: values of each payload."""
    NOT_YET = 4
    """Of a PULL, after some milliseconds: the clocks do not allow it yet; ask again. numbers: tasks waited for."""
    PUSH = 5
    """worker, sequence, weight; numbers: number of tasks, the tasks, number of shards, then (shard, position read) of
    all shards whose head this server is, then payloads. Every such shard gets the update, even without a slice."""
    PUSHED = 6
    """On all replicas. numbers: (shard, position, staleness) of each shard."""
    REFUSED = 7
    """epoch: the server's; text: why. Get a newer view and ask who holds it there."""
    FAILED = 8
    """The request is wrong, and would be anywhere; text: why."""
    FORWARD = 9
    """From a server to its successor. epoch; numbers and tensors: as `server` packs them."""
    COMMITTED = 10
    """From a server to its predecessor. numbers: (shard, position) up to which updates are on all its successors."""
    COPY = 11
    """A shard for a replica in the making."""
    FIGURES = 12
    """Asks a server for its figures; answered by FIGURES with JSON in text."""
    PING = 14
    """Asks whether anybody hears; answered by PING."""
    CHANGED = 13
    """Asks the tails of shards which rows were changed, where the job has them noted. worker: whose own updates do not
    count. numbers: (table, shard, position): after which position. Answered by PULLED, with the position of each shard
    in the order of the numbers, and a tensor of keys ([n] int64) for each."""
    NORMS = 15
    """Asks the tails of shards how far they are with a clock's step, and what they know of its norm (`shard.norms`).
    clock; numbers: the shards. Answered by PULLED; numbers: the stage of each, tensor: the value of each (float64)."""


class Slice(NamedTuple):
    """What a payload has for a shard: elements (dense) or rows `begin` to `end` of it."""

    shard: int
    begin: int
    end: int


class Payload(NamedTuple):
    """What a message has for one table.

    Attributes:
        table: its index.
        codec: number of the codec that `values` went through; 0: none.
        slices: in rising order of shards, one after the other. A dense table's elements of a shard are its ranges in
            rising order (`layout.dense_ranges`), and all of them.
        tensors: keys first, for rows ([n] int64, sorted by shard). Then the values: with codec 0 one tensor of all
            slices ([n] elements or [n, width] rows), else those that the codec made of each slice, slice after slice.
    """

    table: int
    codec: int
    slices: tuple[Slice, ...]
    tensors: tuple[Tensor, ...] = ()


def packed(payloads: Iterable[Payload]) -> list[int]:
    """Return payloads as numbers; their tensors go beside, in order."""
    numbers: list[int] = []
    for table, codec, slices, tensors in payloads:
        numbers += (table, codec, len(tensors), len(slices))
        for part in slices:
            numbers += part
    return numbers


class Columns(NamedTuple):
    """A payload as it arrives: its slices by column. See `Payload`."""

    table: int
    codec: int
    shards: list[int]
    begins: list[int]
    ends: list[int]
    tensors: tuple[Tensor, ...]

    def bounds(self) -> list[int] | None:
        """Return where slices begin, and where the last one ends; None: they do not lie one after the other, from 0."""
        bounds = [0, *self.ends]
        return bounds if self.begins == bounds[:-1] and sorted(bounds) == bounds else None


def columns(numbers: NDArray[np.int64], tensors: Sequence[Tensor]) -> list[Columns]:
    """Read what `packed` wrote.

    Raises:
        ValueError: the numbers are not of this form.
    """
    values: list[int] = numbers.tolist()
    found, at, taken = [], 0, 0
    while at < len(values):
        if len(values) < at + 4 or len(values) < at + 4 + 3 * values[at + 3]:
            raise ValueError("payloads end too early")
        table, codec, held, count = values[at : at + 4]
        at += 4
        end = at + 3 * count
        if held < 0 or count < 0 or taken + held > len(tensors):
            raise ValueError("payloads ask for more tensors than there are")
        slices = values[at:end:3], values[at + 1 : end : 3], values[at + 2 : end : 3]
        found.append(Columns(table, codec, *slices, tuple(tensors[taken : taken + held])))
        at, taken = end, taken + held
    return found


def unpacked(numbers: NDArray[np.int64], tensors: Sequence[Tensor]) -> list[Payload]:
    """Read what `packed` wrote, slice by slice.

    Raises:
        ValueError: as `columns`.
    """
    return [
        Payload(table, codec, tuple(map(Slice, shards, begins, ends)), its)
        for table, codec, shards, begins, ends, its in columns(numbers, tensors)
    ]
