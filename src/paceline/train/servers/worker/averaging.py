"""Local steps: a worker trains by itself for a while, and servers average what all workers came to.

(Local SGD: Stich, 2019; with adaptive optimizers and momentum outside: DiLoCo, Douillard et al., 2023.) A task is then
`every` steps on the same piece of each step's batch; its push is the difference between before and after. The local
optimizer's state stays with the worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from paceline.exchange.interface import NO_ROWS, Arrivals, RowsWanted
from paceline.exchange.job import Mode
from paceline.train.data import MicroBatch
from paceline.train.servers.worker.computer import Computed, Evaluated, Prepared
from paceline.train.servers.worker.replica import Replica


class LocalSteps:
    """Runs a replica for several steps at a time; a `worker.Computer`.

    Args:
        replica: computes gradients.
        optimizer: over its module's parameters.
        every: steps of a task.
        portions: returns the samples of a step's piece, numbered as tasks of one step each.
        factors: how many times its own the optimizer's learning rate is, by step; nothing: always its own.
    """

    def __init__(
        self,
        replica: Replica,
        optimizer: Optimizer,
        every: int,
        portions: Callable[[int], Sequence[MicroBatch]],
        factors: Sequence[float] = (),
    ) -> None:
        self._factors = factors
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._replica = replica
        self._optimizer = optimizer
        self._every = every
        self._portions = portions
        job = replica.job
        self._pieces = job.pieces
        synchronous = job.tables[0].consistency.mode is Mode.BSP
        self._share = 1.0 if synchronous else 1 / job.pieces  # of what is not averaged but added up

    @property
    def dense(self) -> Sequence[int]:
        """See `worker.Computer`."""
        return self._replica.dense

    @property
    def sparse(self) -> Sequence[int]:
        """See `worker.Computer`."""
        return ()

    @property
    def rooms(self) -> Sequence[Tensor]:
        """See `worker.Computer`."""
        return self._replica.rooms

    @property
    def overlaps(self) -> bool:
        """Never: what was read is kept to compare with."""
        return False

    def order(self) -> None:
        """See `worker.Computer`."""

    def prepare(self, portions: Sequence[MicroBatch]) -> Prepared:
        """Do nothing: the samples are read step by step."""
        return Prepared(portions, None, {})

    def take(self, prepared: Prepared) -> RowsWanted:
        """See `worker.Computer`."""
        return NO_ROWS

    def arrived(self, tables: Sequence[int]) -> None:
        """See `worker.Computer`."""
        self._replica.arrived(tables)

    def compute(self, task: int, arrivals: Arrivals | None = None) -> Computed:
        """Take the steps of a task; what comes of it stands where gradients do."""
        before = self._replica.read()
        clock, piece = divmod(task, self._pieces)
        losses: list[tuple[float, float]] = []
        for step in range(clock * self._every, (clock + 1) * self._every):
            number = step * self._pieces + piece
            self._replica.take(self._replica.prepare(self._portions(number)))
            computed = self._replica.compute(number)
            if computed.weight:
                losses.append((computed.loss, computed.weight))
                self._set_rate(step)
                self._optimizer.step()
        total = sum(weight for _, weight in losses)
        if not total:
            return Computed(math.nan, 0.0, {}, {})
        moved = {table: (before[table] - now).mul_(self._share) for table, now in self._replica.whole().items()}
        loss = math.fsum(loss * weight for loss, weight in losses) / total
        return Computed(loss, total, moved, {})

    def _set_rate(self, step: int) -> None:
        if self._factors:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self._factors[step]

    def evaluate(self, batches: Iterable[MicroBatch], read: Callable[[RowsWanted], None]) -> Evaluated:
        """See `worker.Computer`."""
        return self._replica.evaluate(batches, read)
