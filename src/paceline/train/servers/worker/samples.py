"""Which samples a task has: a function of its number, so that it is the same whoever computes it.

Step s of the run is step s of the loader's order (`data.order`), cut into tasks of equal size. The last step of an
epoch may be smaller; then its last tasks have fewer samples, or none.
"""

from __future__ import annotations

import math
from functools import lru_cache

from paceline.errors import DataError
from paceline.train.data import Batch, MicroBatch, Source
from paceline.train.data.order import Cut, Indices, Order


def samples_of_step(step: int, samples: int, batch: int) -> int:
    """Return how many samples a step has. step: from 0; samples: of an epoch; batch: of a regular step."""
    return min(batch, samples - step % math.ceil(samples / batch) * batch)


class TaskSamples:
    """Reads the samples of tasks.

    Args:
        source: where samples come from.
        batch: samples of a step, over all tasks.
        pieces: tasks of a step.
        micro_batches: pieces that a task is computed in, one after the other.
        seed: of the order.
        shard: (index, count), the part of every micro-batch that this process loads; `ParallelModule.input_shard`.
        divisor: number of parts that the mesh divides a micro-batch into.
        first, group: of each step only the tasks `first` to `first + group` are dealt here, as those of smaller steps.

    Raises:
        DataError: there are no samples.
    """

    def __init__(
        self,
        source: Source,
        batch: int,
        pieces: int,
        micro_batches: int = 1,
        *,
        seed: int = 0,
        shard: tuple[int, int] = (0, 1),
        divisor: int = 1,
        first: int = 0,
        group: int | None = None,
    ) -> None:
        self._source = source
        self._batch = batch
        self._regular = batch // pieces
        self._micro_batches = micro_batches
        self._seed = seed
        self._shard = shard
        self._divisor = divisor
        self._first = first
        self._group = group or pieces
        self._order = lru_cache(maxsize=2)(self._order_of)
        self.steps_of_epoch = math.ceil(len(source) / batch)
        if not len(source):
            raise DataError(f"{source.name} holds no samples.")

    def portions(self, task: int) -> list[MicroBatch]:
        """Return this process's part of the micro-batches of a task; none if nothing is left for it."""
        order = self._indices(task)
        cut = Cut(len(order), self._regular, self._micro_batches, self._divisor)
        parts = cut.parts(0) if len(order) else ()
        return [
            MicroBatch(self._source.batch(order[part.of_rank(*self._shard)]), part.whole, part.samples)
            for part in parts
        ]

    def example(self) -> Batch:
        """Return a micro-batch of regular size, for all ranks together: to capture the module with."""
        return self._source.batch(self._order(0)[: self._regular // self._micro_batches])

    def _indices(self, task: int) -> Indices:
        """The samples of a task, over all ranks. [n]"""
        step, piece = divmod(task, self._group)
        epoch, index = divmod(step, self.steps_of_epoch)
        start = index * self._batch + (self._first + piece) * self._regular
        end = min(start + self._regular, (index + 1) * self._batch)
        return self._order(epoch)[start:end]

    def _order_of(self, epoch: int) -> Order:
        return Order(len(self._source), self._seed, epoch, self._source.block)
