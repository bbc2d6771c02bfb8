"""What an update must be to be applied: it fits the tables, and it was computed within their bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from paceline.errors import ExchangeError
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.shard.clocks import Clocks
from paceline.exchange.shard.norms import closed_by
from paceline.exchange.table.route import stray_key
from paceline.exchange.table.rules import rule_of
from paceline.exchange.updates import Part, Update


class Checks:
    """The checks of one shard.

    Args:
        job: what is kept.
        number: of the shard.
        tables: those of which it holds something.
        counts: elements of each dense one.
    """

    def __init__(self, job: Job, number: int, tables: Sequence[int], counts: Mapping[int, int]) -> None:
        self._job = job
        self._number = number
        self._tables = tables
        self._counts = counts
        self._has_steps = job.closes_steps or any(job.is_synchronous(table) for table in tables)
        self._dtypes = [getattr(torch, table.dtype) for table in job.tables]

    def check(self, update: Update, clocks: Clocks, position: int) -> None:
        """Check an update that was not applied yet.

        Args:
            update: what was pushed.
            clocks: the tasks applied so far.
            position: updates applied so far.

        Raises:
            ExchangeError: it cannot be applied; the message names worker, shard and table.
        """
        if update.sequence < 1:
            raise ExchangeError(f"{self._name(update)}: sequences begin with 1.")
        clock = closed_by(self._job, update.worker, update.sequence)
        if clock is not None:
            self._check_closing(update, clock, clocks)
            return
        if update.read > position:
            raise ExchangeError(
                f"{self._name(update)} was computed from position {update.read}, and the shard is at {position}. Was "
                "the job restored while the worker went on? Start the worker anew."
            )
        for part in update.parts:
            self._check_part(update, part)
        if len(update.parts) > 1 and len({part.table for part in update.parts}) < len(update.parts):
            raise ExchangeError(f"{self._name(update)} has several parts for one table; add them up.")
        if update.tasks:
            self._check_tasks(update, clocks)
            self._check_bounds(update, clocks)
        else:
            for part in update.parts:
                rule_of(self._job.tables[part.table].rule).check_can_add()

    def _check_closing(self, update: Update, clock: int, clocks: Clocks) -> None:
        if update.tasks or update.parts or not (math.isfinite(update.weight) and update.weight >= 0):
            raise ExchangeError(
                f"{self._name(update)} closes clock {clock} with the norm {update.weight} and has tasks "
                f"{list(update.tasks)} and {len(update.parts)} parts; it has neither, and a finite norm from 0."
            )
        if not clocks.completed == clock < clocks.gathered:
            raise ExchangeError(
                f"{self._name(update)} closes clock {clock}; here clocks below {clocks.completed} are closed, and of "
                f"those below {clocks.gathered} all tasks are here."
            )

    def _check_tasks(self, update: Update, clocks: Clocks) -> None:
        tasks = update.tasks
        if tasks[0] < 0 or (len(tasks) > 1 and any(one >= other for one, other in pairwise(tasks))):
            raise ExchangeError(f"{self._name(update)} is of tasks {list(tasks)}; tasks are from 0, in rising order.")
        held = [task for task in tasks if clocks.holds(task)]
        if held:
            raise ExchangeError(
                f"{self._name(update)} is of tasks {list(tasks)}, and {held} were applied already: the worker was "
                "taken for dead, and somebody else did them. It must join anew."
            )
        if self._has_steps and self._job.clock(tasks[0]) != self._job.clock(tasks[-1]):
            raise ExchangeError(
                f"{self._name(update)} is of tasks {list(tasks)}, which are of several clocks ({self._job.pieces} "
                "tasks each); where a table is synchronous, what belongs to a clock is pushed by itself."
            )
        if self._has_steps and not (math.isfinite(update.weight) and update.weight >= 0):
            raise ExchangeError(
                f"{self._name(update)} weighs {update.weight}; a weight is a finite number from 0, such as the samples."
            )

    def _check_bounds(self, update: Update, clocks: Clocks) -> None:
        """Check what the bounds promise: of now, and of when the parameters were read that it was computed from."""
        clock = self._job.clock(update.tasks[-1])
        widest: int | None = 0
        for part in update.parts:
            bound = self._job.tables[part.table].consistency.bound
            widest = None if bound is None or widest is None else max(widest, bound)
            if bound is not None and clocks.completed < clock - bound:
                raise ExchangeError(
                    f"{self._name(update)} is of clock {clock}, and table {self._job.tables[part.table].name} may be "
                    f"read once all tasks of clocks below {clock - bound} are applied; missing are "
                    f"{list(clocks.missing(clock - bound))}. Pull before computing, and wait until it is answered."
                )
        if update.read < 0 or widest is None or not update.parts:
            return
        needed = clocks.reached(clock - widest)
        if update.read < needed:
            raise ExchangeError(
                f"{self._name(update)} is of clock {clock} and was computed from position {update.read}; within a "
                f"bound of {widest} clocks it may be from {needed} on. Pull for each task anew."
            )

    def _check_part(self, update: Update, part: Part) -> None:
        table, keys, values = part
        if table not in self._tables:
            raise ExchangeError(f"{self._name(update)} is for table {table}; held are {list(self._tables)}.")
        kept = self._job.tables[table]
        if values.dtype is not self._dtypes[table]:
            raise ExchangeError(f"{self._name(update)} has {values.dtype} for table {kept.name}, of {kept.dtype}.")
        if isinstance(kept, DenseTable):
            if keys is not None or values.shape != (self._counts[table],):
                raise ExchangeError(
                    f"{self._name(update)} has {'keys and ' if keys is not None else ''}values {list(values.shape)} "
                    f"for table {kept.name}; it is dense, and [{self._counts[table]}] elements of it are here."
                )
            return
        right = keys is not None and keys.dtype is torch.int64 and keys.ndim == 1
        if keys is None or not right or values.shape != (keys.shape[0], kept.width):
            given = "no keys" if keys is None else f"keys {keys.dtype} {list(keys.shape)}"
            raise ExchangeError(
                f"{self._name(update)} has {given} and values {list(values.shape)} for table {kept.name}; it takes "
                f"int64 keys [n] and rows [n, {kept.width}]."
            )
        stray = stray_key(keys, self._number, self._job.shards)
        if stray is not None:
            raise ExchangeError(f"{self._name(update)} has key {stray} of table {kept.name}: of another shard.")

    def _name(self, update: Update) -> str:
        return f"update {update.sequence} of worker {update.worker} for shard {self._number}"
