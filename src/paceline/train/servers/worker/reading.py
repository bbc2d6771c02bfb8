"""What a worker reads of a task, and when: before it, while it is computed, or while the one before is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from paceline.exchange.interface import Arrivals, Exchange, Fetching, Pending, RowsWanted
from paceline.exchange.job import Job, SparseTable
from paceline.train.servers.worker.computer import Computed, Computer, Prepared
from paceline.train.servers.worker.local import Local


class ReadAhead(Enum):
    """What of the next task is read while one is computed."""

    SAMPLES = "samples"
    """Its samples only: parameters are as new as they can be."""
    ROWS = "rows"
    """Also rows of tables that may be a clock old."""
    PARAMETERS = "parameters"
    """Also dense parameters that may be a clock old."""


@dataclass(frozen=True)
class Early:
    """What is on its way for a task that has not begun.

    Attributes:
        pending: all of it.
        dense: by table, where it comes to.
        rows: by table, keys and where they come to.
    """

    pending: Pending
    dense: Mapping[int, Tensor]
    rows: RowsWanted


class Reader:
    """Reads what a computer needs for its tasks.

    Args:
        exchange: of the parameters.
        computer: which computes with them.
        ahead: what may be read before its task begins.
    """

    def __init__(self, exchange: Exchange, computer: Computer, ahead: ReadAhead) -> None:
        self._exchange, self._computer = exchange, computer
        self._fetching = exchange if isinstance(exchange, Fetching) else None
        self._job = job = exchange.job
        self._every = job.tables[0].consistency.fetch_every  # the same for all tables
        self._local = Local(job, computer.sparse) if self._every > 1 else None
        self._unread = True
        self._since = 0  # tasks computed with what was read of dense tables
        early = [table for table in range(len(job.tables)) if _may_be_early(job, table, ahead)]
        self._early_dense = [table for table in computer.dense if table in early]
        self._early_rows = [table for table in computer.sparse if table in early]
        self._spare: dict[int, Tensor] = {}

    def again(self) -> None:
        """What was read is void: dense tables are read for the next task."""
        self._unread = True

    def begin(self, prepared: Prepared, clock: int) -> Early | None:
        """Begin to read for the next task; None where nothing may be read yet. Another thread may compute meanwhile."""
        if self._fetching is None:
            return None
        rooms = self._rooms()
        dense = {table: self._spare_for(table, rooms[table]) for table in self._early_dense} if self._due else {}
        keys = {table: some for table, some in prepared.keys.items() if table in self._early_rows}
        if self._local is not None and not self._due:
            keys = self._local.lacking(keys)
        rows = self._rooms_for(keys)
        if not dense and not rows:
            return None
        return Early(self._fetching.fetch(list(dense), list(dense.values()), clock, rows), dense, rows)

    def read(self, prepared: Prepared, early: Early | None, clock: int, *, afresh: bool) -> Arrivals | None:
        """Read what a task needs, and begin with it.

        Args:
            prepared: its samples.
            early: what `begin` gave for it.
            clock: its own.
            afresh: read dense tables, though those of an earlier task would still serve.

        Returns:
            Dense tables that are still on their way.

        Raises:
            Interrupted: a read would wait for a task whose worker is gone.
        """
        wanted = self._computer.take(prepared)
        dense: list[int] = []
        if afresh or self._due:
            self._unread = True  # until it has succeeded
            dense = list(self._computer.dense)
            if self._local is not None:
                self._local.clear()
        lacking = wanted
        if self._local is not None:
            lacking = self._rooms_for(self._local.lacking({table: keys for table, (keys, _) in wanted.items()}))
        came = self._come(early, lacking)
        arrivals = self._in_order(dense, clock) if not any(table in came for table in dense) else None
        at_once = [] if arrivals is not None else [table for table in dense if table not in came]
        self.read_now(at_once, {table: some for table, some in lacking.items() if table not in came}, clock)
        if self._local is not None:
            self._local.put(lacking)
            self._local.read(wanted)
        self._computer.arrived([*([] if arrivals is not None else dense), *wanted])
        if dense:
            self._unread, self._since = False, 0
        self._since += 1
        return arrivals

    def read_now(self, dense: Sequence[int], rows: RowsWanted, clock: int) -> None:
        """Read all of these, at once where the exchange can.

        Raises:
            Interrupted: see `read`.
        """
        if not dense and not rows:
            return
        of_dense = self._rooms()
        rooms = [of_dense[table] for table in dense]
        if self._fetching is not None:
            self._fetching.pull_together(dense, rooms, clock, rows)
            return
        if dense:
            self._exchange.pull(dense, rooms, clock)
        for table, (keys, room) in rows.items():
            self._exchange.pull_rows(table, keys, room, clock)

    def learn(self, computed: Computed, clock: int) -> None:
        """Take a step with the gradients of a task, where the next one is computed with the same parameters."""
        if self._local is not None and not self._due:
            self._local.step(clock, self._rooms(), computed.dense, computed.rows)
            self._computer.arrived(list(computed.dense))

    @property
    def _due(self) -> bool:
        """Whether dense tables are read for the next task."""
        return self._unread or self._since == self._every

    def _rooms(self) -> dict[int, Tensor]:
        return dict(zip(self._computer.dense, self._computer.rooms, strict=True))

    def _spare_for(self, table: int, room: Tensor) -> Tensor:
        """Return where a dense table goes while its room is in use."""
        if table not in self._spare:
            self._spare[table] = torch.empty_like(room)
        return self._spare[table]

    def _rooms_for(self, keys: Mapping[int, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return somewhere to read these rows to; tables of which none are wanted are left out."""
        found = {}
        for table, some in keys.items():
            described = self._job.tables[table]
            assert isinstance(described, SparseTable)
            if len(some):
                room = torch.empty(len(some), described.width, dtype=getattr(torch, described.dtype))
                found[table] = (some, room)
        return found

    def _come(self, early: Early | None, rows: RowsWanted) -> set[int]:
        """Wait for what was read early, and put it where it is wanted; return its tables."""
        if early is None:
            return set()
        early.pending.wait()
        rooms = self._rooms()
        for table, values in early.dense.items():
            rooms[table].copy_(values)
        for table, (_, values) in early.rows.items():
            rows[table][1].copy_(values)
        return {*early.dense, *early.rows}

    def _in_order(self, dense: Sequence[int], clock: int) -> Arrivals | None:
        """Begin to read dense tables in the order of their use, if they may come while it computes."""
        computer, order = self._computer, self._computer.order()
        if not dense or not computer.overlaps or order is None or self._fetching is None:
            return None
        rooms = self._rooms()
        return self._fetching.pull_in_order(order, [rooms[table] for table in order], clock)


def _may_be_early(job: Job, table: int, ahead: ReadAhead) -> bool:
    """Whether a table is read before its task begins: it then lacks, at the least, the update of the task before."""
    described = job.tables[table]
    bound = described.consistency.bound
    wanted = (ReadAhead.ROWS, ReadAhead.PARAMETERS) if isinstance(described, SparseTable) else (ReadAhead.PARAMETERS,)
    return ahead in wanted and (bound is None or bound > 0)
