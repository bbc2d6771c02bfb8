"""What is asked of a server, and why it may not be given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.errors import ExchangeError


class Refused(Exception):
    """A request that this server may not serve, though another may. epoch: of this server; shards: that it lacks."""

    def __init__(self, epoch: int, why: str, shards: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.epoch, self.shards = epoch, tuple(shards)


class Unsure(Refused):
    """This server does not know for the moment whether it is one. That says nothing of what it is asked."""


class Broken(Exception):
    """This server cannot go on: what it holds is not what its log says. why: the log could not be written."""

    def __init__(self, why: ExchangeError) -> None:
        super().__init__(str(why))
        self.why = why


class NotYet(Exception):
    """The clocks do not allow a read yet. tasks: it waits for."""

    def __init__(self, tasks: Sequence[int]) -> None:
        super().__init__(f"waits for tasks {list(tasks)}")
        self.tasks = tuple(tasks)


class Read(NamedTuple):
    """What is to be read of one table.

    Attributes:
        table: its index.
        shards: of which.
        bounds: elements of a dense table, or rows, of `shards[i]` are from `bounds[i]` to `bounds[i + 1]`.
        keys: of the rows; None: all elements of a dense table.
        out: where it goes; None, of a dense table in one shard: it is to be lent.
    """

    table: int
    shards: Sequence[int]
    bounds: Sequence[int]
    keys: Tensor | None
    out: Tensor | None


class Changed(NamedTuple):
    """Which rows of a table in a shard were changed after a position."""

    table: int
    shard: int
    since: int


class Found(NamedTuple):
    """What was read.

    Attributes:
        positions: of each shard.
        values: of each read, in order; what was lent stays as it is only while this very tensor is kept.
    """

    positions: dict[int, int]
    values: list[Tensor]
