"""What operators and redistributions cost, in seconds, for the solver to compare.

A roofline over the figures of a machine: they rank strategies, they are not predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Self

import torch

from paceline.placement.machine import Machine
from paceline.placement.placements import PARTIAL, REPLICATE, Placement, Shard
from paceline.placement.redistribute import Collective, collective_of
from paceline.placement.rules.rule import Call
from paceline.program.work import Shapes, operations

aten = torch.ops.aten
ours = torch.ops.paceline
_UPDATE = 7
"""Times that an optimizer touches a parameter: Adam reads it, its gradient and two moments, and writes three."""


@dataclass(frozen=True)
class Costs:
    """Prices of one axis or of all. Those of links that nobody measured follow from `latency` and `per_byte_sent`.

    Attributes:
        latency: seconds of a collective, however little it sends.
        per_byte_sent: seconds for a byte that leaves a rank.
        machine: what operators, and collectives that were measured, take.
        per_byte_held: seconds that a byte is worth which a rank need not hold for the backward pass, or for good.
    """

    latency: float = 150e-6
    per_byte_sent: float = 1 / 1.2e9
    machine: Machine = field(default_factory=Machine)
    per_byte_held: float = 0.0

    @classmethod
    def default(cls) -> Self:
        """Return round figures of one CPU core and loopback sockets: the same everywhere."""
        return cls()

    @classmethod
    def of_machine(cls, machine: Machine) -> Self:
        """Return the costs on a machine."""
        return cls(machine=machine)

    def along(self, axis: str, parts: int) -> Self:
        """Return the prices of one axis of a mesh, of so many ranks."""
        return replace(self, machine=self.machine.along(axis, parts))

    def redistribution(
        self, nbytes: float, source: Placement, target: Placement, parts: int, *, itemsize: int = 4
    ) -> float:
        """Cost of redistributing a tensor of `nbytes` (whole, with respect to the axis) over `parts` ranks.

        A sum over ranks of elements of less than 4 bytes loses digits that the serial sum keeps: it is priced above
        that of the float32 tensor to which such a tensor is often cast next.
        """
        if source == target:
            return 0.0
        if source == PARTIAL and itemsize < 4:
            nbytes *= 5 / itemsize
        kind = collective_of(source, target)
        if kind is None:
            return self.machine.per_call if source == REPLICATE else self._touching(nbytes)
        return self._collective(kind, nbytes, parts) + self._packing(kind, nbytes, source, target, parts)

    def operator(self, call: Call, inputs: tuple[Placement, ...], outputs: tuple[Placement, ...], parts: int) -> float:
        """Cost of running a call on one rank's pieces."""
        if call.target in _FREE:
            return 0.0
        touched = 0.0
        for shape, dtype, placement in zip(call.inputs, call.dtypes, inputs, strict=True):
            touched += prod(shape) * dtype.itemsize / (parts if isinstance(placement, Shard) else 1)
        for out, out_dtype, placement in zip(call.outputs, call.output_dtypes, outputs, strict=True):
            if out is not None and out_dtype is not None:
                touched += prod(out) * out_dtype.itemsize / (parts if isinstance(placement, Shard) else 1)
        return self.machine.per_call + self._products(call, (*inputs, *outputs), parts) + self._touching(touched)

    def update(self, nbytes: float) -> float:
        """Cost of an optimizer's update of so many bytes of parameters, which every rank that holds them makes."""
        return self._touching(_UPDATE * nbytes)

    def _collective(self, kind: Collective, nbytes: float, parts: int) -> float:
        measured = self.machine.links.get(parts)
        if measured is not None:
            return measured[kind].seconds(nbytes)
        sent = (parts - 1) / parts * nbytes
        if kind is Collective.ALL_REDUCE:
            sent *= 2
        elif kind is Collective.ALL_TO_ALL:
            sent /= parts
        return self.latency + sent * self.per_byte_sent

    def _packing(self, kind: Collective, nbytes: float, source: Placement, target: Placement, parts: int) -> float:
        """Cost of putting pieces in order before they are sent, or after they have come."""
        match kind:
            case Collective.ALL_REDUCE:
                return 0.0
            case Collective.ALL_TO_ALL:
                return self._touching(2 * nbytes / parts)
            case Collective.ALL_GATHER if target == REPLICATE and source == Shard(0):
                return 0.0  # they lie in order as they come
        return self._touching(nbytes)

    def _products(self, call: Call, placements: Sequence[Placement], parts: int) -> float:
        flops = matmul_flops(call)
        if not flops:
            return 0.0
        split = [placement for placement in placements if isinstance(placement, Shard)]
        count: float = _products_in(call)
        if split:
            flops /= parts
            if count > 1 and any(placement.dim in _BATCH[call.target] for placement in split):
                count /= parts
        return flops / self._rate(call, flops / count)

    def _rate(self, call: Call, flops: float) -> float:
        itemsize = max(dtype.itemsize for dtype in call.dtypes)
        if itemsize <= 2:
            return self.machine.half_products.rate(flops)
        return self.machine.products.rate(flops) * (4 / itemsize)

    def _touching(self, nbytes: float) -> float:
        return self.machine.touching.seconds(nbytes)


_FREE = {aten.expand.default, aten.select.int, aten.slice.Tensor}


def matmul_flops(call: Call) -> float:
    """Floating-point operations of the matrix products and convolutions in a call; 0 for all other operators."""
    found = operations(Shapes(call.target, call.inputs, call.outputs, call.arguments))
    return 0.0 if found is None else found.flops


_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ours.causal_rows.default,
    ours.causal_rows_backward.default,
    ours.ring_rows.default,
    ours.ring_rows_backward.default,
)
_BATCH = {aten.bmm.default: (0,), **dict.fromkeys(_ATTENTION, (0, 1))}
"""Dimensions over which a call makes one product after the other."""


def _products_in(call: Call) -> int:
    """How many products a call makes one after the other."""
    return prod(call.inputs[0][: len(_BATCH.get(call.target, ()))]) or 1
