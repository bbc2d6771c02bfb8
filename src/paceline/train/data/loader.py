"""The loader: steps of micro-batches from a source, one step ahead of the training in a background thread.

Which samples make a step is a function of (seed, epoch, step) alone; a rank loads its slice of every micro-batch. So a
run may be resumed at any other number of ranks and goes on in the same order. Ranks among which the module splits
something else than samples load the same slice.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, Self

from paceline.errors import DataError, PlanError
from paceline.train.data.order import Cut, Order
from paceline.train.data.source import Batch, Source

_STATE = ("epoch", "step", "seed", "shuffle", "batch", "length")


@dataclass(frozen=True)
class MicroBatch:
    """What one call of the module works on.

    Attributes:
        batch: this rank's samples: keyword arguments (a dict) or positional ones (a tuple).
        whole: every rank holds all samples of the micro-batch, because there are too few to divide.
        samples: samples of the micro-batch over all ranks.
    """

    batch: Batch
    whole: bool
    samples: int


@dataclass(frozen=True)
class Step:
    """The micro-batches of one optimizer step; `index` counts the steps of the epoch from 0."""

    epoch: int
    index: int
    micro_batches: tuple[MicroBatch, ...]

    @property
    def samples(self) -> int:
        """Samples of the step, over all micro-batches and ranks."""
        return sum(part.samples for part in self.micro_batches)


class Loader:
    """Yields the steps of a source: `iter(loader)` goes on over all epochs from where the loader stands.

    The source is read from a background thread, one step ahead. A dataset that draws from PyTorch's or NumPy's global
    generators does so at that thread's pace; give such a dataset a generator of its own.

    Args:
        source: where samples come from.
        batch: samples of a step, over all ranks and micro-batches.
        micro_batches: equal pieces of a step.
        shard: (index, count), the part of every micro-batch that this process loads; `ParallelModule.input_shard`.
        seed: of the order, from 0 to 2**64 - 1; together with the epoch it determines the order.
        shuffle: a new order in every epoch; the source's own order in all epochs when False.
        drop_last: leave out the last step of an epoch when it is smaller than `batch`.
        divisor: number of parts into which the module splits a micro-batch, when that is not `shard`'s count: with all
            ranks in one process, that process loads everything (shard (0, 1)) and the module still divides it.

    Raises:
        PlanError: the batch cannot be divided; the message names sizes that would work.
        DataError: an epoch would hold no step.
    """

    def __init__(
        self,
        source: Source,
        batch: int,
        micro_batches: int = 1,
        shard: tuple[int, int] = (0, 1),
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        divisor: int | None = None,
    ) -> None:
        index, parts = shard
        divisor = parts if divisor is None else divisor
        if not 0 <= index < parts or divisor % parts:
            raise PlanError(f"shard {index} of {parts} cannot load for {divisor} parts; an index is below its count.")
        if not 0 <= seed < 2**64:
            raise DataError(f"seed is {seed}; it is a whole number from 0 to 2**64 - 1.")
        self._source = source
        self._shard = shard
        self._seed = seed
        self._shuffle = shuffle
        self._cut = Cut(len(source), batch, micro_batches, divisor, drop_last)
        self._epoch = 0
        self._next = 0
        self._running: weakref.WeakSet[Generator[Step, None, None]] = weakref.WeakSet()
        self._order = lru_cache(maxsize=1)(self._order_of)
        if len(self) == 0:
            raise DataError(
                f"{source.name} holds {len(source)} samples, fewer than one batch of {batch}; use a smaller batch"
                f"{', or keep the last batch of an epoch (drop_last: false)' if len(source) else ''}."
            )

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self._cut.steps

    def __iter__(self) -> Iterator[Step]:
        """Yield steps over all epochs, from where the loader stands.

        The loader stands behind a step as soon as that step is handed out: a state taken while it is worked on goes on
        with the one after it.

        Raises:
            DataError: the source could not be read; the loader then stands before that step.
        """
        with closing(self._prefetched(self._from(self._epoch, self._next))) as steps:
            for step in steps:
                self._epoch, self._next = step.epoch, step.index + 1
                if self._next == len(self):
                    self._epoch, self._next = step.epoch + 1, 0
                yield step

    def epoch(self, number: int = 0) -> Iterator[Step]:
        """Return an iterator over the steps of one epoch, without moving the loader: validation, say."""
        return self._prefetched(iter([(number, index) for index in range(len(self))]))

    def example(self) -> Batch:
        """Return the first regular micro-batch, for all ranks together: the global batch to capture the module with."""
        part = next(self._cut.parts(0))
        return self._source.batch(self._order(0)[part.start : part.start + part.samples])

    def close(self) -> None:
        """End all iterations; no thread is left behind. The loader can be iterated again."""
        for steps in list(self._running):
            steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, in numbers that do not depend on ranks or micro-batches."""
        return {
            "epoch": self._epoch,
            "step": self._next,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "batch": self._cut.batch,
            "length": self._cut.length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state` says. Running iterations end; iterate again to go on.

        Raises:
            DataError: the state is of other data or of another order, or falls into the middle of a step.
        """
        missing = [key for key in _STATE if key not in state]
        if missing:
            raise DataError(
                f"the position in the data lacks {', '.join(missing)}; it holds {', '.join(state) or 'nothing'}."
            )
        if state["length"] != self._cut.length:
            raise DataError(
                f"the position was saved with data of {state['length']} samples, but {self._source.name} now holds "
                f"{self._cut.length}. Going on would repeat and miss samples: restore the data, or start without the "
                "position."
            )
        for key, mine in (("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != mine:
                raise DataError(
                    f"the position was saved with {key} {state[key]}, and now {key} is {mine}: another order. Set "
                    f"{key} back to {state[key]}, or start without the position."
                )
        done = state["step"] * state["batch"]
        if done % self._cut.batch:
            raise DataError(
                f"the position is behind {done} samples of epoch {state['epoch']} (step {state['step']} of batch "
                f"{state['batch']}), which is no multiple of the batch of {self._cut.batch}. Use a batch that divides "
                f"{done}: {state['batch']}, for example."
            )
        self.close()
        self._epoch, self._next = int(state["epoch"]), int(done // self._cut.batch)
        if self._next >= len(self):  # nothing is left of the epoch at this batch size: its rest is dropped
            self._epoch, self._next = self._epoch + 1, 0

    def _from(self, epoch: int, first: int) -> Iterator[tuple[int, int]]:
        for number in count(epoch):
            for index in range(first if number == epoch else 0, len(self)):
                yield number, index

    def _prefetched(self, places: Iterator[tuple[int, int]]) -> Generator[Step, None, None]:
        steps = self._generate(places)
        self._running.add(steps)
        return steps

    def _generate(self, places: Iterator[tuple[int, int]]) -> Generator[Step, None, None]:
        """Yield the steps at `places` (epoch, index); the next one is read while the last one is worked on."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-data") as thread:
            ahead: Future[Step] | None = None
            for epoch, index in places:
                following = thread.submit(self._read, epoch, index)
                if ahead is not None:
                    yield ahead.result()
                ahead = following
            if ahead is not None:
                yield ahead.result()

    def _read(self, epoch: int, index: int) -> Step:
        order = self._order(epoch)
        parts = (
            MicroBatch(self._source.batch(order[part.of_rank(*self._shard)]), part.whole, part.samples)
            for part in self._cut.parts(index)
        )
        return Step(epoch, index, tuple(parts))

    def _order_of(self, epoch: int) -> Order:
        return Order(self._cut.length, self._seed, epoch, self._source.block, shuffle=self._shuffle)
