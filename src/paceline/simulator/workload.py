"""What a training step consists of, by blocks that repeat, with how each amount shrinks when the step is split.

A workload does not depend on a layout: each amount says along what it divides, so the same blocks serve all layouts at
once. Amounts may be arrays, which are broadcast with the arrays of layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from paceline.simulator.layouts import Layouts

Numbers = NDArray[np.float64]
Scalar = float | Numbers


class Along(StrEnum):
    """What an amount is divided along."""

    BATCH = "batch"
    """It is for one sample, and grows with the samples of a micro-batch on one rank."""
    TP = "tp"
    SP = "sp"
    HW = "hw"
    REGION = "region"
    """Work between the split layers of tensor parallelism (norms, dropout, residuals): every rank of `tp` does all of
    it, or, where a layout says so, its share of the sequence."""


@dataclass(frozen=True)
class Amount:
    """A size, a number of bytes or of elements.

    Attributes:
        value: of one sample where it grows with the batch, of the whole otherwise.
        along: what divides it.
    """

    value: Scalar
    along: frozenset[Along] = frozenset()

    def on(self, layouts: Layouts) -> Numbers:
        """Return the amount for one micro-batch on one rank, for each layout."""
        amount = np.asarray(self.value, dtype=np.float64)
        if Along.BATCH in self.along:
            amount = amount * layouts.micro_batch
        if Along.TP in self.along:
            amount = amount / layouts.tp
        if Along.SP in self.along:
            amount = amount / layouts.sp
        if Along.HW in self.along:
            amount = amount / layouts.hw
        if Along.REGION in self.along:
            amount = amount / np.where(layouts.regions, layouts.tp, 1)
        return amount


class Kind(Enum):
    """What limits a piece of work."""

    PRODUCT = "product"
    ATTENTION = "attention"
    TOUCH = "touch"


class Pass(Enum):
    """When it is done."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Recompute(Enum):
    """What the backward pass computes again instead of keeping it."""

    NONE = 0
    SELECTIVE = 1
    """Attention, whose scores are large and cheap."""
    FULL = 2
    """Whole blocks: only their inputs are kept."""


@dataclass(frozen=True)
class Work:
    """One call, or several elementwise calls that run as one.

    Attributes:
        kind: what limits it.
        when: forward or backward.
        dims: of a product, rows, columns and inner dimension; of attention, queries, keys and the size of a head.
        times: how many products of these dimensions, or heads of attention, there are.
        factor: of attention, operations for each query, key and element of a head: 4 forward, 8 backward, 10 where
            scores are computed again; half of it where a mask lets half of them be left out.
        nbytes: read and written in memory.
        selective: whether selective recomputation does it again.
        launches: calls that a device has to start for it.
    """

    kind: Kind
    when: Pass
    dims: tuple[Amount, ...] = ()
    times: Amount = Amount(1.0)
    factor: float = 2.0
    nbytes: Amount = Amount(0.0)
    selective: bool = False
    launches: float = 1.0

    def flops(self, layouts: Layouts) -> Numbers:
        """Return floating-point operations for one micro-batch on one rank."""
        if self.kind is Kind.TOUCH:
            return np.zeros(())
        flops = self.factor * self.times.on(layouts)
        for dim in self.dims:
            flops = flops * dim.on(layouts)
        return flops


class Collective(StrEnum):
    """What ranks do together."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"


@dataclass(frozen=True)
class Message:
    """A collective inside a block, once for each micro-batch.

    Attributes:
        kind: which.
        along: the axis over whose ranks it goes (`TP`, `SP` or `HW`).
        nbytes: of the whole tensor: what an all-reduce sums, what an all-gather returns.
        when: forward or backward.
    """

    kind: Collective
    along: Along
    nbytes: Amount
    when: Pass


@dataclass(frozen=True)
class Block:
    """A part of a model that occurs once or several times in a row.

    Attributes:
        name: the user's module, `blocks.*` where it repeats.
        count: how often it occurs; an array where models differ.
        work: calls of one occurrence.
        messages: collectives of one occurrence.
        parameters: elements of its parameters, in pieces that divide differently.
        kept: bytes that its backward pass reads of its forward pass, by what is computed again.
        output: bytes that it hands on to the next block.
        workspace: bytes that it needs for a while beside what it keeps, such as logits before their loss is known.
        shared: elements of parameters of an earlier block that it reads, too: where that is on another rank, a copy.
    """

    name: str
    count: Scalar
    work: tuple[Work, ...]
    messages: tuple[Message, ...]
    parameters: tuple[Amount, ...]
    kept: Mapping[Recompute, tuple[Amount, ...]]
    output: Amount
    workspace: Amount = Amount(0.0)
    shared: tuple[Amount, ...] = ()

    @property
    def repeats(self) -> bool:
        """Whether it occurs several times, so that stages of a pipeline share its occurrences."""
        return bool(np.any(np.asarray(self.count) > 1))


@dataclass(frozen=True)
class Precision:
    """Bytes for each element of a parameter.

    Attributes:
        dtype: of products, by name.
        parameter: of the value that programs read.
        gradient: of its gradient.
        optimizer: of everything else that the optimizer keeps, master copies included.
    """

    dtype: str = "bfloat16"
    parameter: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0


@dataclass(frozen=True)
class Workload:
    """A training step of one model.

    Attributes:
        name: of the model.
        blocks: in the order of the forward pass. Those that occur once are never divided among stages; the others are.
        tokens: per sample, where it has tokens; 1 otherwise.
        precision: bytes by what they are for.
        divisors: sizes by which an axis may split: those that divide the number here.
    """

    name: str
    blocks: tuple[Block, ...]
    tokens: Scalar = 1.0
    precision: Precision = Precision()
    divisors: Mapping[Along, int] = field(default_factory=dict)
