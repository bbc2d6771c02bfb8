"""A replica: the user's module, whose parameters come from servers and whose gradients go there.

Knows a parallel module by its public interface, working sets, and the job's tables by their index; no servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from paceline.errors import NonFiniteError
from paceline.exchange.interface import NO_ROWS, Arrivals, Rows, RowsWanted
from paceline.exchange.job import DenseTable, Job
from paceline.runtime.arrivals import order_of_use
from paceline.runtime.interface import ParallelModule
from paceline.runtime.module import PlacedModule
from paceline.runtime.state import Shard
from paceline.train.classification import Scorer
from paceline.train.data import Batch, MicroBatch
from paceline.train.data.order import Cut
from paceline.train.loop import derived_seed
from paceline.train.servers.worker.computer import Computed, Evaluated, Prepared
from paceline.train.servers.worker.pieces import pieces_of
from paceline.train.servers.worker.working_set import Taken, WorkingSet

_WORTH_OVERLAPPING_BYTES: Final = 4 << 20
"""Below this much of dense parameters a thread for them costs more than it hides."""


class Replica:
    """A module that computes gradients of tasks.

    Args:
        module: from `paceline.parallelize`.
        user_module: which it was made from; its parameters are where reads arrive.
        job: what is kept.
        seed: of random operators, with the task.
        equal: micro-batches count alike, whatever their losses are means over.
        working_set: of `user_module`, where it has sparse tables.
        scorer: scores held-out data by a method of `user_module`.
        cut: samples of a task are given whole and in one, as a working set wants them, and are cut here so, into
            micro-batches and what of these is of this process; None: they are given as they are computed.
        clip: largest global norm of a task's gradient; None: any.
    """

    def __init__(
        self,
        module: ParallelModule,
        user_module: nn.Module,
        job: Job,
        *,
        seed: int = 0,
        equal: bool = False,
        working_set: WorkingSet | None = None,
        scorer: Scorer | None = None,
        cut: Cut | None = None,
        clip: float | None = None,
    ) -> None:
        self._clip = clip
        self.module = module
        self.job = job
        self._seed = seed
        self._equal = equal
        self._working_set = working_set
        self._scorer = scorer
        self._cut = cut
        self._number = {table.name: index for index, table in enumerate(job.tables)}
        self.dense = tuple(index for index, table in enumerate(job.tables) if isinstance(table, DenseTable))
        self.sparse = tuple(index for index in self._number.values() if index not in self.dense)
        self._pieces = pieces_of(module, user_module, job, working_set.rooms if working_set is not None else None)
        self._taken: Taken | None = None
        self._portions: Sequence[MicroBatch] = ()
        self._arrivals: Arrivals | None = None
        self._order: list[int] | None = None
        self.overlaps = self._may_overlap()
        if self.overlaps:
            assert isinstance(module, PlacedModule)
            module.arrival = self._wait

    def _may_overlap(self) -> bool:
        return (
            isinstance(self.module, PlacedModule)
            and self.module.peers.alone
            and not self.module.plan.compile
            and sum(room.nbytes for room in self.rooms) >= _WORTH_OVERLAPPING_BYTES
            and all(map(self._pieces.is_parameter, self.dense))
        )

    @property
    def rooms(self) -> list[Tensor]:
        """Where dense tables are read into, in the order of `dense`; on other ranks than the first one only some."""
        return [self._pieces.rooms[table] for table in self.dense if table in self._pieces.rooms]

    def read(self) -> dict[int, Tensor]:
        """Return copies of dense tables as they were read, by table; none on other ranks than the first one."""
        return {table: self._pieces.rooms[table].clone() for table in self.dense} if self.leads else {}

    def prepare(self, portions: Sequence[MicroBatch]) -> Prepared:
        """Make the samples of a task ready; any thread may, while another task is computed."""
        if self._working_set is None or not portions:
            return Prepared([part for portion in portions for part in self._parts(portion)], None, {})
        (portion,) = portions
        taken = self._working_set.take(portion.batch)
        keys = {self._number[name]: some for name, some in taken.keys.items()}
        return Prepared(self._parts(replace(portion, batch=plain(taken.batch))), taken, keys)

    def _parts(self, portion: MicroBatch) -> list[MicroBatch]:
        """Return what this process computes of what it was given."""
        if self._cut is None:
            return [portion]
        shard = self.module.input_shard
        return [
            MicroBatch(some_of(portion.batch, part.of_rank(*shard)), part.whole, part.samples)
            for part in replace(self._cut, length=portion.samples).parts(0)
        ]

    def take(self, prepared: Prepared) -> RowsWanted:
        """Begin with a task; return keys ([n]) and room ([n, width]) of the rows that it needs, by table."""
        self._portions, self._taken, _ = prepared
        if self._working_set is None or self._taken is None:
            return NO_ROWS
        room, names = self._working_set.room, self.job.tables
        return {table: (keys, room(self._taken, names[table].name)) for table, keys in prepared.keys.items()}

    @property
    def leads(self) -> bool:
        """Whether the first rank is here."""
        return 0 in self.module.ranks

    def order(self) -> list[int] | None:
        """Return dense tables in the order in which the forward pass reads them, once that is known."""
        return self._order

    def arrived(self, tables: Sequence[int]) -> None:
        """Hand what was read on to the ranks; a collective."""
        self._pieces.hand_out(tables)

    def compute(self, task: int, arrivals: Arrivals | None = None) -> Computed:
        """Return the gradient of the task that was taken.

        Args:
            task: its number.
            arrivals: dense tables that are still on their way.

        Raises:
            NonFiniteError: loss or gradient became NaN or infinite.
            Interrupted: a table that is on its way has to wait; the task is to be taken again.
        """
        self.module.zero_grad(set_to_none=True)
        if not self._portions:
            return Computed(math.nan, 0.0, {}, {})
        self._arrivals = arrivals
        try:
            seeds = [derived_seed(self._seed, task, index) for index in range(len(self._portions))]
            loss, weight = self.module.accumulate(self._portions, seeds, equal=self._equal)
        finally:
            self._arrivals = None
        if self._order is None and self.overlaps:
            self._order = self._order_of_use()
        if weight == 0:
            return Computed(math.nan, 0.0, {}, {})
        norm = None if self._clip is None else float(self.module.clip_grad_norm_(self._clip))
        dense = self._pieces.gather(self.dense, _gradient)
        rows = self._row_gradients()
        _check_finite(task, loss, norm or 0.0, {self.job.tables[table].name: value for table, value in dense.items()})
        return Computed(loss, weight, dense, rows, norm)

    def _wait(self, name: str) -> None:
        if self._arrivals is not None and name in self._number:
            self._arrivals.wait(self._number[name])

    def _order_of_use(self) -> list[int]:
        assert isinstance(self.module, PlacedModule)
        batch = self._portions[0].batch
        step = self.module.step(**batch) if isinstance(batch, dict) else self.module.step(*batch)
        used = [self._number[name] for name in order_of_use(step) if name in self._number]
        used = [table for table in used if table in self.dense]
        return used + [table for table in self.dense if table not in used]

    def whole(self) -> dict[int, Tensor]:
        """Return dense tables as the ranks have them now, on the first rank; see `Pieces.gather`."""
        return self._pieces.gather(self.dense, lambda shard: shard.tensor.detach())

    def _row_gradients(self) -> dict[int, Rows]:
        if self._working_set is None or self._taken is None:
            return {}
        gathered = self._pieces.gather(self.sparse, _gradient)
        if not self.leads:
            return {}
        named = {self.job.tables[table].name: gradient for table, gradient in gathered.items()}
        found = self._working_set.gradients(self._taken, named)
        return {self._number[name]: rows for name, rows in found.items()}

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], read: Callable[[RowsWanted], None]) -> Evaluated:
        """Look at batches in eval mode.

        Args:
            batches: of held-out data.
            read: reads rows: by table their keys, and where they go.
        """
        self.module.eval()
        loss, total = 0.0, 0.0
        try:
            for batch in batches:
                prepared = self.prepare([batch])
                read(self.take(prepared))
                self.arrived(self.sparse if self._working_set is not None else ())
                value, weight = self.module.mean_loss(self._portions, equal=self._equal)
                if weight:
                    loss, total = loss + value * weight, total + weight
                if self._scorer is not None:
                    self._scorer.add(batch.batch if prepared.taken is None else plain(prepared.taken.batch))
        finally:
            self.module.train()
        metrics = self._scorer.result() if self._scorer is not None else {}
        return Evaluated(loss / total if total else math.nan, total, metrics)


def plain(batch: Mapping[str, Any] | tuple[Any, ...]) -> Batch:
    """Return a batch as sources give it."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def some_of(batch: Batch, samples: slice) -> Batch:
    """Return some samples of a batch."""
    if isinstance(batch, Mapping):
        return {name: tensor[samples] for name, tensor in batch.items()}
    return tuple(tensor[samples] for tensor in batch)


def _gradient(shard: Shard) -> Tensor | None:
    return shard.tensor.grad


def _check_finite(task: int, loss: float, norm: float, gradients: Mapping[str, Tensor]) -> None:
    if math.isfinite(loss):
        norms = torch._foreach_norm(list(gradients.values())) if gradients else []
        bad = [name for name, one in zip(gradients, norms, strict=True) if not math.isfinite(float(one))]
        if not bad and math.isfinite(norm):
            return
        what = f"the gradient of '{bad[0]}' in task {task} is NaN or infinite"
        if not bad:
            what = f"the gradient of task {task} is too large to be clipped: its norm is {norm}"
    else:
        what = f"the loss of task {task} is {loss}"
    raise NonFiniteError(
        f"{what}. It was not pushed, and what is on servers lacks it. Try a lower learning rate, and resume."
    )
