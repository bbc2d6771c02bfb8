"""Servers on one side of a bridge, over connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.exchange.client.changed import Changed
from paceline.exchange.interface import Exchange, RowsWanted
from paceline.exchange.job import DenseTable, Job, SparseTable
from paceline.exchange.membership.member import Member
from paceline.exchange.view import View
from paceline.train.servers.groups.meeting import Difference, Values


class Over(Exception):
    """The group has ended, and its servers are gone."""


class Seated:
    """A member that pushes under another id; see `client.Membership`. It goes no further once the job has ended.

    Args:
        member: of the job.
        id: as whom it pushes.
    """

    def __init__(self, member: Member, id: int) -> None:
        self._member = member
        self.id = id

    @property
    def view(self) -> View:
        """See `client.Membership`."""
        return self._member.view

    @property
    def orphans(self) -> bool:
        """Never: a bridge computes no tasks of others."""
        return False

    @property
    def fenced(self) -> bool:
        """See `client.Membership`.

        Raises:
            Over: the job has ended well.
        """
        if self._member.ended and not self._member.failure:
            raise Over
        return self._member.fenced

    @property
    def failure(self) -> str:
        """See `client.Membership`."""
        return self._member.failure

    def wait_for_view(self, newer_than: int, timeout_s: float) -> View:
        """See `client.Membership`."""
        return self._member.wait_for_view(newer_than, timeout_s)

    def on_view(self, callback: Callable[[View], None]) -> None:
        """See `client.Membership`."""
        self._member.on_view(callback)


class Shared(Exchange, Protocol):
    """What a bridge asks of an exchange."""

    @property
    def positions(self) -> Mapping[int, int]:
        """Of each shard that the last read asked."""
        ...

    def pull_together(self, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted) -> None:
        """See `interface.Fetching`."""
        ...

    def changed(self, tables: Sequence[int], since: Sequence[int]) -> Changed:
        """See `client.ServerExchange`."""
        ...


class Servers:
    """One side, on servers; see `bridge.Side`.

    Args:
        exchange: with them.
        known: of each shard the position up to which changed rows are known; empty: of none.
    """

    def __init__(self, exchange: Shared, known: Sequence[int] = ()) -> None:
        self._exchange = exchange
        self.known: Sequence[int] = known or [-1] * exchange.job.shards

    @property
    def job(self) -> Job:
        """See `bridge.Side`."""
        return self._exchange.job

    @property
    def positions(self) -> Mapping[int, int]:
        """See `bridge.Side`."""
        return self._exchange.positions

    def changed(self, tables: Sequence[int]) -> Mapping[int, Tensor]:
        """See `bridge.Side`."""
        keys, self.known = self._exchange.changed(tables, self.known)
        return keys

    def read(self, tables: Sequence[int], keys: Mapping[int, Tensor], clock: int) -> Values:
        """See `bridge.Side`."""
        return read_with(self._exchange, tables, keys, clock)

    def push(self, tasks: Sequence[int], difference: Difference) -> None:
        """See `bridge.Side`."""
        push_with(self._exchange, tasks, difference)


class Reading(Exchange, Protocol):
    """An exchange that reads tables and rows at once."""

    def pull_together(self, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted) -> None:
        """See `interface.Fetching`."""
        ...


def read_with(exchange: Reading, tables: Sequence[int], keys: Mapping[int, Tensor], clock: int) -> Values:
    """Read whole tables, and rows, into tensors of their own."""
    dense, rows = {}, {}
    for index, table in enumerate(exchange.job.tables):
        dtype = getattr(torch, table.dtype)
        if index in tables and isinstance(table, DenseTable):
            dense[index] = torch.empty(table.shape, dtype=dtype)
        elif index in keys and isinstance(table, SparseTable):
            rows[index] = torch.empty(len(keys[index]), table.width, dtype=dtype)
    exchange.pull_together(list(dense), list(dense.values()), clock, {t: (keys[t], rows[t]) for t in rows})
    return Values(dense, rows)


def push_with(exchange: Exchange, tasks: Sequence[int], difference: Difference) -> None:
    """Push a difference, and return once it is acknowledged. Nothing is said of what it was computed from."""
    exchange.forget()
    exchange.push(tasks, difference.dense, difference.rows)
    exchange.flush()
