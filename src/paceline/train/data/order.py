"""The order of samples, and who loads which: pure arithmetic on indices.

Everything follows from (length, seed, epoch, batch, micro-batches); the number of ranks only decides how one fixed
order is cut. Source of the random numbers: Philox (Salmon et al., 2011), a counter-based generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PlanError

Indices = NDArray[np.int64]

# The key of the fixed permutation that sets validation samples apart; no epoch ever has this number.
_HOLD_OUT = 2**64 - 1

_WINDOW = 64
"""Blocks whose samples are shuffled among each other."""


def permutation(length: int, seed: int, epoch: int, stream: int = 0) -> Indices:
    """Return the order of `length` samples in an epoch: [length], a function of its arguments only.

    Streams of a seed and an epoch are independent of each other.

    NumPy promises that the raw stream of a bit generator never changes, but not what `Generator.permutation` makes of
    it; a run must be resumable under another NumPy, so samples are sorted by raw numbers here.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=[0, 0, 0, stream]).random_raw(length)
    return np.argsort(np.asarray(raw, dtype=np.uint64), kind="stable").astype(np.int64, copy=False)


class Order:
    """The order of the samples of an epoch, of which slices can be taken.

    Of samples that lie in a row in a file, `block` says how many are read together. Blocks are shuffled, and samples
    are shuffled within windows of `_WINDOW` blocks: so reading stays near itself, and memory depends on the number of
    blocks, not of samples. Data of a single window, and of sources that do not mind, is shuffled as a whole.
    """

    def __init__(self, length: int, seed: int, epoch: int, block: int | None = None, *, shuffle: bool = True) -> None:
        self._length = length
        self._key = (seed, epoch)
        self._shuffle = shuffle
        self._block = length if block is None or length <= block * _WINDOW else block
        self._window = lru_cache(maxsize=2)(self._window_of)
        if shuffle and self._block < length:
            self._blocks = permutation(-(-length // self._block), seed, epoch)
            sizes = np.minimum(length - self._blocks * self._block, self._block)
            self._starts = np.concatenate([[0], np.add.reduceat(sizes, range(0, len(sizes), _WINDOW)).cumsum()])
        else:
            self._starts = np.array([0, length])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> Indices:
        """Return the samples at some positions: [n]."""
        start, stop, step = where.indices(self._length)
        if step != 1:
            raise ValueError(f"an order is sliced in steps of 1, not {step}")
        if not self._shuffle or start >= stop:
            return np.arange(start, stop, dtype=np.int64)
        first, last = (int(i) for i in np.searchsorted(self._starts, [start, stop - 1], side="right") - 1)
        offset = int(self._starts[first])
        if first == last:  # nothing that is much longer than what is wanted is copied
            return self._window(first)[start - offset : stop - offset].copy()
        return np.concatenate([self._window(w) for w in range(first, last + 1)])[start - offset : stop - offset]

    def _window_of(self, number: int) -> Indices:
        if self._block == self._length:
            return permutation(self._length, *self._key)
        blocks = self._blocks[number * _WINDOW : (number + 1) * _WINDOW]
        inside = np.arange(self._block, dtype=np.int64)
        samples = (blocks[:, None] * self._block + inside).ravel()
        samples = samples[samples < self._length]
        return samples[permutation(len(samples), *self._key, stream=number + 1)]


def hold_out(length: int, fraction: float) -> tuple[Indices, Indices]:
    """Divide samples into those to train on and those to validate on, each in rising order.

    The choice is random, because data sets are often sorted or periodic, and depends on nothing but the arguments.
    """
    count = min(max(round(length * fraction), 1), length) if fraction > 0 else 0
    order = permutation(length, 0, _HOLD_OUT)
    return np.sort(order[count:]), np.sort(order[:count])


def hold_out_files(count: int, fraction: float) -> NDArray[np.bool_]:
    """Return which of `count` files to validate on, evenly spread: for 0.05 the 20th, the 40th and so on. [count]."""
    taken = np.floor(np.arange(count + 1) * fraction)
    return np.asarray(taken[1:] > taken[:-1], dtype=np.bool_)


@dataclass(frozen=True)
class Part:
    """One micro-batch as a range of positions in the epoch's order.

    Attributes:
        start: first position.
        samples: number of samples, over all ranks.
        whole: too few to divide; every rank loads all of them.
    """

    start: int
    samples: int
    whole: bool = False

    def of_rank(self, index: int, count: int) -> slice:
        """Return the positions that a rank which computes part `index` of `count` loads."""
        if self.whole:
            return slice(self.start, self.start + self.samples)
        share = self.samples // count
        return slice(self.start + index * share, self.start + (index + 1) * share)


@dataclass(frozen=True)
class Cut:
    """How an epoch is cut into steps and micro-batches.

    Attributes:
        length: samples of the data.
        batch: samples of a step, over all ranks.
        micro_batches: pieces of a full step.
        divisor: the number of parts that a divided micro-batch is split into, one for each group of ranks that
            computes the same samples.
        drop_last: leave out the last step of an epoch when it is smaller than `batch`.

    Raises:
        PlanError: the micro-batches do not divide the batch, or the parts do not divide a micro-batch.
    """

    length: int
    batch: int
    micro_batches: int
    divisor: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batches", "divisor"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; it is a whole number from 1.")
        unit = self.micro_batches * self.divisor
        if self.batch % unit == 0:
            return
        below = self.batch // unit * unit
        sizes = " or ".join(str(size) for size in (below, below + unit) if size)
        problem = (
            f"a batch of {self.batch} samples cannot be cut into {self.micro_batches} equal micro-batches, each split "
            f"into {self.divisor} parts. Batch sizes that would work: {sizes}, any multiple of {unit}."
        )
        if self.batch % self.micro_batches:
            raise PlanError(f"{problem} Numbers of micro-batches that divide the batch: {_divisors(self.batch)}.")
        piece = self.batch // self.micro_batches
        raise PlanError(
            f"{problem} With micro-batches of {piece}, meshes whose axes that split the batch multiply to one of "
            f"these would work: {_divisors(piece)}."
        )

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.length // self.batch if self.drop_last else math.ceil(self.length / self.batch)

    def parts(self, step: int) -> Iterator[Part]:
        """Yield the micro-batches of a step of the epoch; all parts of all steps tile the epoch without overlap.

        The last step may be smaller. It is cut into micro-batches no larger than the regular ones, each of which
        `divisor` divides, and at most one remainder of fewer samples, which every rank loads whole.
        """
        start, end = step * self.batch, min((step + 1) * self.batch, self.length)
        regular = self.batch // self.micro_batches
        divisible = end - (end - start) % self.divisor
        while start < divisible:
            samples = min(regular, divisible - start)
            yield Part(start, samples)
            start += samples
        if start < end:
            yield Part(start, end - start, whole=True)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
