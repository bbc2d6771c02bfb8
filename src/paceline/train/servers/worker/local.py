"""Parameters as a worker has them between two fetches of Downpour (Dean et al., 2012), on which it takes steps itself.

Its steps are plain gradient descent at the learning rate of the servers' rule, as there. What it pushes is the sum of
its gradients, and what it fetches takes the place of all that it came to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from paceline.exchange.interface import Rows, RowsWanted
from paceline.exchange.job import Job, SparseTable
from paceline.exchange.table.rules import rule_of


class Local:
    """What one worker has of the tables of a job; dense ones are where they were read to.

    Args:
        job: for tables and their rules.
        sparse: tables whose rows are kept.
    """

    def __init__(self, job: Job, sparse: Iterable[int]) -> None:
        self._job = job
        self._lr = [rule_of(table.rule).lr for table in job.tables]
        self._rows = {table: _LocalRows(job.tables[table]) for table in sparse}

    def clear(self) -> None:
        """Forget all rows: they are to be fetched anew."""
        for rows in self._rows.values():
            rows.clear()

    def lacking(self, keys: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return which of these keys are not here, by table; any thread may ask while steps are taken."""
        return {table: self._rows[table].lacking(some) for table, some in keys.items()}

    def put(self, came: RowsWanted) -> None:
        """Keep rows that were fetched: keys that were lacking, and their values."""
        for table, (keys, values) in came.items():
            self._rows[table].put(keys, values)

    def read(self, rows: RowsWanted) -> None:
        """Write rows, all of which are here, to where they are wanted."""
        for table, (keys, room) in rows.items():
            self._rows[table].read(keys, room)

    @torch.no_grad()
    def step(
        self, clock: int, rooms: Mapping[int, Tensor], dense: Mapping[int, Tensor], rows: Mapping[int, Rows]
    ) -> None:
        """Take a step.

        Args:
            clock: of the task that the gradients are of.
            rooms: dense tables.
            dense: gradients by table.
            rows: gradients of rows by table.
        """
        rate = self._job.rate(clock)
        for table, gradient in dense.items():
            rooms[table].sub_(gradient.view(rooms[table].shape), alpha=self._lr[table] * rate)
        for table, (keys, gradients) in rows.items():
            self._rows[table].step(keys, gradients, self._lr[table] * rate)


class _LocalRows:
    """Rows by key, sorted."""

    def __init__(self, table: object) -> None:
        assert isinstance(table, SparseTable)
        self._width, self._dtype = table.width, getattr(torch, table.dtype)
        self.clear()

    def clear(self) -> None:
        self._keys = np.empty(0, np.int64)
        self._values = torch.empty(0, self._width, dtype=self._dtype)

    def lacking(self, keys: Tensor) -> Tensor:
        if not len(self._keys):
            return keys
        return keys[torch.from_numpy(~np.isin(keys.numpy(), self._keys, assume_unique=True))]

    def put(self, keys: Tensor, values: Tensor) -> None:
        joined = np.concatenate([self._keys, keys.numpy()])
        order = np.argsort(joined, kind="stable")
        self._keys = joined[order]
        self._values = torch.cat([self._values, values])[torch.from_numpy(order)]

    def read(self, keys: Tensor, room: Tensor) -> None:
        room.copy_(self._values[self._places(keys)])

    def step(self, keys: Tensor, gradients: Tensor, rate: float) -> None:
        self._values.index_add_(0, self._places(keys), gradients.to(self._dtype), alpha=-rate)

    def _places(self, keys: Tensor) -> Tensor:
        return torch.from_numpy(np.searchsorted(self._keys, keys.numpy()))
