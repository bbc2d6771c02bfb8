"""How a group and the global servers meet.

A group goes on by itself; at a meeting what it has moved since the last one is added to the global parameters, by its
share, and what the other groups have moved comes back to it. (Elastic averaging, Zhang et al., 2015, with the whole
difference.) Meetings are the tasks of the global job, so that no group runs far ahead of another.

What is to be moved is first computed and written down, then pushed to both sides, as an update of this bridge with the
number of the meeting: so a bridge that died is followed by another, which pushes it again, and it counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.exchange.job import DenseTable, Job
from paceline.train.servers.groups.ledger import Ledger, Note
from paceline.train.servers.groups.meeting import Difference, Kind, Meeting, Met, Values, moves


def bridge_id(group: int) -> int:
    """Return as whom the bridge of a group pushes, on both sides, whichever process it is."""
    return -1 - group


def task_of(meeting: int, group: int, groups: int) -> int:
    """Return the task of the global job that a meeting is."""
    return (meeting - 1) * groups + group


class Side(Protocol):
    """Servers that a bridge is between: of the group, or the global ones."""

    @property
    def job(self) -> Job:
        """What they keep."""
        ...

    @property
    def positions(self) -> Mapping[int, int]:
        """Of each shard that the last `read` asked."""
        ...

    @property
    def known(self) -> Sequence[int]:
        """Of each shard the position up to which changed rows are known."""
        ...

    def changed(self, tables: Sequence[int]) -> Mapping[int, Tensor]:
        """Return rows that others have changed since this was last asked, and maybe more: by table [n] int64."""
        ...

    def read(self, tables: Sequence[int], keys: Mapping[int, Tensor], clock: int) -> Values:
        """Read whole tables, and rows."""
        ...

    def push(self, tasks: Sequence[int], difference: Difference) -> None:
        """Push, and return once it is on all replicas."""
        ...


class Bridge:
    """Meets the global servers for a group.

    Args:
        group: its number.
        groups: how many there are.
        above: the global servers.
        ledger: of the group.
    """

    def __init__(self, group: int, groups: int, above: Side, ledger: Ledger) -> None:
        self._group, self._groups = group, groups
        self._above, self._ledger = above, ledger
        self.last = ledger.last()
        self._pushed = 0  # the last meeting that went to the global servers from here
        tables = above.job.tables
        self._count = len(tables)
        self._dense = [index for index, table in enumerate(tables) if isinstance(table, DenseTable)]
        self._sparse = [index for index in range(self._count) if index not in self._dense]

    def meet(self, inside: Side) -> None:
        """Add what the group has moved to the global parameters, and what others have moved to the group's."""
        met = self._rows(inside)
        keys = {table: held.keys for table, held in met.items()}
        there = self._above.read(self._dense, keys, self.last.number)  # the clock of this meeting, as they count
        beside = [self._count + table for table in self._dense]
        here = inside.read([*self._dense, *beside], keys | {self._count + t: k for t, k in keys.items()}, 0)
        self._agree(Kind.MET, here, there, met, inside)
        self.settle(inside)

    def meet_last(self, here: Values, met: Mapping[int, Met]) -> None:
        """Meet with what the group held at its end."""
        keys = {table: held.keys for table, held in met.items()}
        there = self._above.read(self._dense, keys, self.last.number)
        self._agree(Kind.LAST, here, there, met, None)
        self.settle(None)

    def pass_over(self) -> None:
        """Let a meeting be one of nothing: the group has ended, and others count on it."""
        last = self.last
        self.last = Meeting(last.number + 1, last.base, Kind.NOTHING, Difference(), last.back)
        self._ledger.agree(self.last, Note(self.last.number, Kind.NOTHING))
        self.settle(None)

    def settle(self, inside: Side | None) -> None:
        """Push what the last meeting moves; what was pushed before counts once. inside: None where it has ended."""
        last = self.last
        if last.kind is Kind.BEGAN:
            return
        if self._pushed < last.number:
            self._above.push([task_of(last.number, self._group, self._groups)], last.moved)
            self._pushed = last.number
        if inside is not None and last.kind is Kind.MET:
            inside.push([], last.back)

    def _rows(self, inside: Side) -> dict[int, Met]:
        """Return the rows that the group or others have changed."""
        if not self._sparse:
            return {}
        own, others = inside.changed(self._sparse), self._above.changed(self._sparse)
        met = {}
        for table in self._sparse:
            keys = torch.unique(torch.cat([own[table], others[table]]))
            met[table] = Met(keys, torch.isin(keys, own[table]))
        return met

    def _agree(self, kind: Kind, here: Values, there: Values, met: Mapping[int, Met], inside: Side | None) -> None:
        number = self.last.number + 1
        moved, back = moves(self._count, 1 / self._groups, here, there, met)
        known = () if inside is None else inside.known
        agreed = Meeting(number, self.last.base, kind, moved, back, known, self._above.known)
        at = {} if inside is None else inside.positions
        self._ledger.agree(agreed, Note(number, kind, at, self._above.positions, met))
        self.last = agreed
