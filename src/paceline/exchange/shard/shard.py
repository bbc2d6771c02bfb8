"""The state machine of a shard: tables, clocks and what was applied. Equal updates in equal order give equal bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.job import Job, SparseTable
from paceline.exchange.layout import dense_ranges
from paceline.exchange.shard.changes import Changes
from paceline.exchange.shard.checks import Checks
from paceline.exchange.shard.clocks import Clocks
from paceline.exchange.shard.norms import Share, Stage, closed_by, factor
from paceline.exchange.shard.pieces import Step
from paceline.exchange.shard.sequences import Sequences
from paceline.exchange.table.dense import Dense
from paceline.exchange.table.sparse import KEYS, Sparse
from paceline.exchange.updates import Applied, Part, Update

_SEVERAL: Final = 0
"""Workers are numbered from 1: nobody in particular."""


class ShardState(NamedTuple):
    """All of a shard: copies of its tensors, by name, and plain values for JSON."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]


class Shard:
    """One shard of a job. Used by one thread at a time.

    Args:
        job: what is kept.
        number: of the shard.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.job = job
        self.number = number
        self._position = 0
        self._passed: Update | None = None  # `check` has let it pass, and nothing was applied since
        self._clocks = Clocks(job)
        self._sequences = Sequences()
        self._steps: dict[int, Step] = {}
        self._dense: dict[int, Dense] = {}
        self._sparse: dict[int, Sparse] = {}
        counts = _counts(job, number)
        for index, table in enumerate(job.tables):
            dtype = getattr(torch, table.dtype)
            if isinstance(table, SparseTable):
                self._sparse[index] = Sparse(table.width, dtype, table.rule, table.initializer, job.seed)
            elif index in counts:
                self._dense[index] = Dense(counts[index], dtype, table.rule)
        self._changes = {index: Changes() for index in self._sparse} if job.notes_changes else {}
        self._synchronous = frozenset(filter(job.is_synchronous, range(len(job.tables))))
        self._has_steps = job.closes_steps or not self._synchronous.isdisjoint(self.tables)
        self._checks = Checks(job, number, self.tables, counts)

    @property
    def position(self) -> int:
        """How many updates were applied."""
        return self._position

    @property
    def completed(self) -> int:
        """The clock all tasks of clocks below which were applied."""
        return self._clocks.completed

    @property
    def tables(self) -> tuple[int, ...]:
        """The tables of which this shard holds something."""
        return tuple(sorted((*self._dense, *self._sparse)))

    @property
    def memory_bytes(self) -> int:
        """Of tables with what their rules keep."""
        return sum(self.table(index).memory_bytes for index in self.tables)

    def ready(self, table: int, clock: int) -> bool:
        """Whether who computes a task of `clock` may read a table."""
        bound = self.job.tables[table].consistency.bound
        return bound is None or self._clocks.completed >= clock - bound

    def missing(self, table: int, clock: int) -> tuple[int, ...]:
        """Return tasks that such a reader waits for: the lowest ones, 16 at most."""
        bound = self.job.tables[table].consistency.bound
        return () if bound is None else self._clocks.missing(clock - bound)

    def share(self, clock: int) -> Share:
        """Return how far this shard is with a step, and what it knows of the norm; of a job that closes steps."""
        if clock < self._clocks.completed:
            return Share(Stage.CLOSED, self._clocks.last_norm if clock == self._clocks.completed - 1 else math.nan)
        if clock > self._clocks.completed or clock >= self._clocks.gathered:
            return Share(Stage.GATHERING)
        return Share(Stage.WHOLE, 0.0 if self.job.clip is None else self._steps[clock].squares)

    def read(self, table: int) -> Tensor:
        """Return the elements of a dense table that are here, range after range. [n]; not a copy."""
        return self._dense[table].values

    def lend(self, table: int) -> Tensor:
        """Return what `read` does, as it is now; it stays so while the caller keeps this very tensor; see `Dense`."""
        return self._dense[table].lend()

    def read_rows(self, table: int, keys: Tensor, out: Tensor) -> None:
        """Write rows into `out` ([n, width]); those that nobody has updated yet have their initial values."""
        self._sparse[table].read(keys, out)

    def changed(self, table: int, since: int, other_than: int) -> Tensor:
        """Return rows that tasks have changed after a position, and maybe others: [n] int64, each once.

        Args:
            table: a sparse one, of a job that notes changes.
            since: the position; -1: all rows that there are.
            other_than: a worker whose own updates are left out.

        Raises:
            ExchangeError: nothing is noted of this table.
        """
        if table not in self._changes:
            raise ExchangeError(f"shard {self.number} notes no changes of table {table}; see `Job.notes_changes`.")
        found = self._changes[table].since(since, other_than)
        return self._sparse[table].state()[KEYS] if found is None else found

    def check(self, update: Update) -> None:
        """Check an update before anything changes; what was applied before passes.

        Raises:
            ExchangeError: it does not fit the tables, or it breaks the bound of one.
        """
        if self._earlier(update) is None:
            self._checks.check(update, self._clocks, self._position)
            self._passed = update

    def apply(self, update: Update) -> Applied:
        """Apply an update, once. Its tensors may change afterwards.

        Raises:
            ExchangeError: as `check`; nothing was changed.
        """
        if update is not self._passed:
            earlier = self._earlier(update)
            if earlier is not None:
                return Applied(earlier, 0, True)
            self._checks.check(update, self._clocks, self._position)
        self._passed = None
        staleness = self._staleness(update)
        self._position += 1
        clock = closed_by(self.job, update.worker, update.sequence)
        if clock is not None:
            self._close(clock, update.weight)
            return Applied(self._position, staleness, False)
        self._sequences.add(update.worker, update.sequence, self._position)
        if update.tasks:
            self._learn(update, staleness)
        else:
            self._add(update.parts)
        return Applied(self._position, staleness, False)

    def takes(self, worker: int, sequence: int, tasks: tuple[int, ...], read: int, bound: int | None) -> bool:
        """Whether an update of rows alone is new here, within a bound (None: there is none), and waits for no others.

        Where not, `check` and `apply` decide. See `together`.
        """
        clocks, position = self._clocks, self._position
        if self._has_steps or read > position or clocks.holds_any(tasks):
            return False
        if self._sequences.position(worker, sequence, position) is not None:
            return False
        if bound is None:
            return True
        clock = self.job.clock(tasks[-1]) - bound
        return clocks.completed >= clock and (read < 0 or read >= clocks.reached(clock))

    def count(self, worker: int, sequence: int, tasks: tuple[int, ...], read: int) -> Applied:
        """Count an update that `takes` let pass, and whose rows somebody else applies.

        read: -1 where it has none for this shard, too.
        """
        staleness = self._position - read if read >= 0 else 0
        self._passed = None
        self._position += 1
        self._sequences.add(worker, sequence, self._position)
        self._clocks.add(tasks, self._position)
        return Applied(self._position, staleness, False)

    def rows(self, table: int) -> Sparse:
        """Return what keeps a table of rows.

        Raises:
            KeyError: it is none.
        """
        return self._sparse[table]

    def forget_workers(self) -> None:
        """Forget who pushed what: workers begin anew with the numbers of others. Tasks still count once."""
        self._sequences = Sequences()

    def fill(self, table: int, values: Tensor) -> None:
        """Begin a dense table with these values: its elements that are here, range after range. [n]"""
        self._dense[table].fill(values)

    def clear_touched(self) -> None:
        """Note from here on which rows are changed; see `state`."""
        for table in self._sparse.values():
            table.clear_touched()

    def state(self, touched_only: bool = False) -> ShardState:
        """Return all of the shard, or of rows only those changed since `clear_touched`."""
        tensors: dict[str, Tensor] = {}
        for index in self.tables:
            held = self._dense[index].state() if index in self._dense else self._sparse[index].state(touched_only)
            copies = held if index in self._sparse else {name: tensor.clone() for name, tensor in held.items()}
            tensors |= {f"table.{index}.{name}": tensor for name, tensor in copies.items()}
        steps = {str(clock): step.state(f"step.{clock}", tensors) for clock, step in sorted(self._steps.items())}
        meta = {
            "position": self._position,
            "clocks": self._clocks.state(),
            "sequences": self._sequences.state(),
            "steps": steps,
        }
        return ShardState(tensors, meta)

    @classmethod
    def of(cls, job: Job, number: int, state: ShardState) -> Self:
        """Make a shard that goes on where another was when `state` was taken, to the bit."""
        tensors, meta = state
        made = cls(job, number)
        made._position = meta["position"]
        made._changes = {index: Changes(made._position) for index in made._changes}
        made._clocks = Clocks.of(job, meta["clocks"])
        made._sequences = Sequences.of(meta["sequences"])
        for clock, step in meta["steps"].items():
            made._steps[int(clock)] = Step.of(f"step.{clock}", tensors, step)
        for index in made.tables:
            prefix = f"table.{index}."
            held = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            made.table(index).load(held)
        return made

    def table(self, index: int) -> Dense | Sparse:
        """Return what keeps a table of this shard."""
        return self._dense[index] if index in self._dense else self._sparse[index]

    def _earlier(self, update: Update) -> int | None:
        """Return where an update was applied before, or now's position where only that is known; None: it is new."""
        clock = closed_by(self.job, update.worker, update.sequence)
        if clock is not None:
            return self._position if clock < self._clocks.completed else None
        position = self._sequences.position(update.worker, update.sequence, self._position)
        if position is None and update.tasks and self._clocks.holds_all(update.tasks):
            return self._position
        return position

    def _learn(self, update: Update, staleness: int) -> None:
        clock = self.job.clock(update.tasks[0])
        pieces = []
        for part in update.parts:
            if part.table in self._synchronous:
                pieces.append(part)
            elif self.job.damp_stale and staleness:
                self._update(part._replace(values=part.values / (1 + staleness)), clock, update.worker)
            else:
                self._update(part, clock, update.worker)
        if self._has_steps:
            if clock not in self._steps:
                self._steps[clock] = Step(clock * self.job.pieces)
            self._steps[clock].add(update.tasks, update.weight, pieces)
        self._clocks.add(update.tasks, self._position)
        for done in sorted(self._steps) if self._steps else ():
            if done >= self._clocks.completed:
                break
            for part in self._steps.pop(done).means():
                self._update(part, done, _SEVERAL)

    def _close(self, clock: int, norm: float) -> None:
        """Apply a step, clipped where the job does so."""
        self._clocks.close(norm, self._position)
        scale = 1.0 if self.job.clip is None else factor(self.job.clip, norm)
        for part in self._steps.pop(clock).means():
            self._update(part._replace(values=part.values * scale) if scale < 1 else part, clock, _SEVERAL)

    def _update(self, part: Part, clock: int, worker: int) -> None:
        table, keys, values = part
        factor = self.job.rate(clock)
        if keys is None:
            self._dense[table].update(values, factor)
        else:
            self._sparse[table].update(keys, values, factor)
            if table in self._changes:
                self._changes[table].note(self._position, worker, keys.clone(), len(self._sparse[table]))

    def _add(self, parts: tuple[Part, ...]) -> None:
        for table, keys, values in parts:
            if keys is None:
                self._dense[table].add(values)
            else:
                self._sparse[table].add(keys, values)

    def _staleness(self, update: Update) -> int:
        """Return how many updates came between the read and now; none where all of it is synchronous."""
        if update.read < 0:
            return 0
        for part in update.parts:
            if part.table not in self._synchronous:
                return self._position - update.read
        return 0


def _counts(job: Job, number: int) -> Mapping[int, int]:
    """Return how many elements of each dense table a shard holds."""
    counts: dict[int, int] = {}
    for held in dense_ranges(job):
        if held.shard == number:
            counts[held.table] = counts.get(held.table, 0) + held.count
    return counts
