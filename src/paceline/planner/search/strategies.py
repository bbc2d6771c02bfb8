"""What each pure way of splitting stores and sends, side by side for one model.

With P elements of parameters, of p bytes each, g of a gradient and o of optimizer state, on n ranks that share a batch:

    ddp      stores (p + g + o) P                   sends 2 (n-1)/n g P
    zero-1   stores (p + g) P + o P / n             sends (n-1)/n (g + p) P
    zero-2   stores p P + (g + o) P / n             sends (n-1)/n (g + p) P
    zero-3   stores (p + g + o) P / n               sends (n-1)/n (g + 2 p) P
    server   stores (p + g) P, and the server o P   sends g P to the server, which sends n p P
    tp       stores (p + g + o) of its pieces       sends what its blocks' collectives move
    sp, hw   store  (p + g + o) P                   send that, and 2 (n-1)/n g P
    pp       stores (p + g + o) of its stage        sends 2 b: what a stage hands on, and its gradient

A ring sends 2 (n-1)/n B for an all-reduce of B bytes, (n-1)/n B for an all-gather, a reduce-scatter or an all-to-all
of B bytes in all. Activations come on top; they are those of the whole batch at once, but for `pp`, whose micro-batches
are single samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

import numpy as np

from paceline.simulator.closed_form.footprint import footprint
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Along, Collective, Workload


class Pure(StrEnum):
    """A way of splitting that is used alone."""

    DDP = "ddp"
    ZERO_1 = "zero-1"
    ZERO_2 = "zero-2"
    ZERO_3 = "zero-3"
    SERVER = "server"
    TP = "tp"
    SP = "sp"
    HW = "hw"
    PP = "pp"

    @property
    def summary(self) -> str:
        """What it splits."""
        return {
            Pure.DDP: "batch",
            Pure.ZERO_1: "+ optimizer",
            Pure.ZERO_2: "+ gradients",
            Pure.ZERO_3: "+ parameters",
            Pure.SERVER: "batch",
            Pure.TP: "features and heads",
            Pure.SP: "sequences",
            Pure.HW: "images",
            Pure.PP: "layers",
        }[self]

    @property
    def is_executable(self) -> bool:
        """Whether the runtime runs it."""
        return self not in (Pure.ZERO_1, Pure.SERVER)


@dataclass(frozen=True)
class Strategy:
    """A pure strategy on so many ranks.

    Attributes:
        name: which.
        memory: bytes on the rank that needs most, a server aside, by kind; None where the model cannot be split so.
        sent_bytes: that the busiest rank sends in a step; the server's, where there is one.
        why_not: why the model cannot be split so.
    """

    name: Pure
    memory: Mapping[str, float] | None
    sent_bytes: float
    why_not: str = ""

    @property
    def memory_bytes(self) -> float:
        """All of it."""
        return sum((self.memory or {}).values())


_AXES = {Pure.TP: Along.TP, Pure.SP: Along.SP, Pure.HW: Along.HW}
_RING = {
    Collective.ALL_REDUCE: 2.0,
    Collective.ALL_GATHER: 1.0,
    Collective.REDUCE_SCATTER: 1.0,
    Collective.ALL_TO_ALL: 1.0,
}
"""How often a ring sends (n-1)/n of the whole tensor."""


def strategies(workload: Workload, ranks: int, batch: int) -> list[Strategy]:
    """Return what each strategy stores and sends.

    Args:
        workload: of one model.
        ranks: that share a step.
        batch: samples of a step.
    """
    return [_strategy(workload, name, ranks, batch) for name in Pure]


def _strategy(workload: Workload, name: Pure, ranks: int, batch: int) -> Strategy:
    along = _AXES.get(name)
    if along is not None and (along not in workload.divisors or workload.divisors[along] % ranks):
        size = workload.divisors.get(along)
        there = (
            f"{ranks} does not divide {size}, as the sizes that it splits want"
            if size
            else "there is nothing that it splits"
        )
        return Strategy(name, None, 0.0, there)
    layers = sum(np.max(block.count) for block in workload.blocks if block.repeats)
    if name is Pure.PP and layers < ranks:
        return Strategy(name, None, 0.0, f"there are {layers:.0f} layers for {ranks} ranks")
    if along is None and name is not Pure.PP and batch % ranks:
        return Strategy(name, None, 0.0, f"the batch of {batch} samples does not divide by {ranks}")
    layout = _layout(name, ranks, batch)
    needs = footprint(workload, layout)
    memory = {field.name: float(np.ravel(getattr(needs, field.name))[0]) for field in fields(needs)}
    if name is Pure.SERVER:
        memory["optimizer"] = 0.0
    return Strategy(name, memory, _sent(workload, name, layout, ranks))


def _layout(name: Pure, ranks: int, batch: int) -> Layouts:
    part = max(batch // ranks, 1)
    match name:
        case Pure.DDP:
            return Layouts.of(dp=ranks, micro_batch=part)
        case Pure.ZERO_1:
            return Layouts.of(dp=ranks, zero=1, micro_batch=part)
        case Pure.ZERO_2 | Pure.ZERO_3:
            return Layouts.of(fsdp=ranks, zero=int(name[-1]), micro_batch=part)
        case Pure.SERVER:
            return Layouts.of(dp=ranks, server=True, micro_batch=part)
        case Pure.PP:
            return Layouts.of(pp=ranks, micro_batches=batch)
        case _:
            return Layouts.of(**{name.value: ranks}, micro_batch=batch)


def _sent(workload: Workload, name: Pure, layout: Layouts, ranks: int) -> float:
    precision, part = workload.precision, (ranks - 1) / ranks
    elements = parameter_elements(workload, Layouts.of())
    read, gradient = precision.parameter * elements, precision.gradient * elements
    match name:
        case Pure.DDP:
            return 2 * part * gradient
        case Pure.ZERO_1 | Pure.ZERO_2:
            return part * (gradient + read)
        case Pure.ZERO_3:
            return part * (gradient + 2 * read)
        case Pure.SERVER:
            return max(ranks * read, gradient)
        case Pure.PP:
            middle = next(block for block in workload.blocks if block.repeats)
            return 2 * float(np.max(middle.output.on(layout))) * float(layout.micro_batches[0])
        case _:
            moved = _moved(workload, _AXES[name], layout, part)
            return moved if name is Pure.TP else moved + 2 * part * gradient


def _moved(workload: Workload, along: Along, layout: Layouts, part: float) -> float:
    """Return the bytes that collectives inside of blocks make a rank send."""
    total = 0.0
    for block in workload.blocks:
        for message in block.messages:
            if message.along is along:
                often = part * _RING[message.kind] if message.kind in _RING else 1.0
                total += float(np.max(block.count)) * often * float(np.max(message.nbytes.on(layout)))
    return total


def parameter_elements(workload: Workload, layout: Layouts) -> float:
    """Return the elements of all parameters, as a layout without stages splits them."""
    return float(
        sum(np.max(block.count) * np.max(piece.on(layout)) for block in workload.blocks for piece in block.parameters)
    )
