"""What operators and redistributions cost, in seconds, for the solver to compare.

A roofline with round figures of one CPU core and loopback sockets. They rank strategies; they are not predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from paceline.placement.placements import PARTIAL, REPLICATE, Placement, Shard
from paceline.placement.redistribute import Collective, collective_of
from paceline.placement.rules.rule import Call
from paceline.program import attention  # noqa: F401  (registers operators)

aten = torch.ops.aten
ours = torch.ops.paceline


@dataclass(frozen=True)
class Costs:
    """Coefficients: seconds per collective, per byte sent, per floating-point operation, per byte touched, per call."""

    latency: float = 150e-6
    per_byte_sent: float = 1 / 1.2e9
    per_flop: float = 1 / 45e9
    per_byte_touched: float = 1 / 6e9
    per_call: float = 3e-6

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
        sent = (parts - 1) / parts * nbytes * self.per_byte_sent
        touched = nbytes * self.per_byte_touched
        match collective_of(source, target):
            case None:
                return self.per_call if source == REPLICATE else touched
            case Collective.ALL_REDUCE:
                return self.latency + 2 * sent
            case Collective.REDUCE_SCATTER:
                return self.latency + sent + touched
            case Collective.ALL_TO_ALL:
                return self.latency + (sent + 2 * touched) / parts
            case Collective.ALL_GATHER:
                contiguous = target == REPLICATE and isinstance(source, Shard) and (source.dim, source.blocks) == (0, 1)
                return self.latency + sent + (0.0 if contiguous else touched)

    def operator(self, call: Call, inputs: tuple[Placement, ...], outputs: tuple[Placement, ...], parts: int) -> float:
        """Cost of running a call on one rank's pieces."""
        if call.target in _FREE:
            return 0.0
        divided = any(isinstance(placement, Shard) for placement in (*inputs, *outputs))
        flops = matmul_flops(call) / (parts if divided else 1)
        touched = 0.0
        for shape, dtype, placement in zip(call.inputs, call.dtypes, inputs, strict=True):
            touched += prod(shape) * dtype.itemsize / (1 if placement in (REPLICATE, PARTIAL) else parts)
        for out, out_dtype, placement in zip(call.outputs, call.output_dtypes, outputs, strict=True):
            if out is not None and out_dtype is not None:
                touched += prod(out) * out_dtype.itemsize / (1 if not isinstance(placement, Shard) else parts)
        return self.per_call + flops * self.per_flop + touched * self.per_byte_touched


_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    ours.causal_rows.default,
    ours.ring_rows.default,
}
_ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ours.causal_rows_backward.default,
    ours.ring_rows_backward.default,
}
_FREE = {aten.expand.default, aten.select.int, aten.slice.Tensor}


def matmul_flops(call: Call) -> float:
    """Floating-point operations of the matrix products and convolutions in a call; 0 for all other operators."""
    shapes = call.inputs
    match call.target:
        case aten.mm.default:
            return 2.0 * shapes[0][0] * shapes[0][1] * shapes[1][1]
        case aten.addmm.default:
            return 2.0 * shapes[1][0] * shapes[1][1] * shapes[2][1]
        case aten.bmm.default:
            return 2.0 * prod(shapes[0]) * shapes[1][2]
        case aten.convolution.default:
            return 2.0 * prod(call.outputs[0] or ()) * prod(shapes[1][1:])
        case aten.convolution_backward.default:
            return 4.0 * prod(shapes[0]) * prod(shapes[2][1:])
        case target if target in _ATTENTION:
            return 4.0 * prod(shapes[0]) * shapes[1][2]
        case target if target in _ATTENTION_BACKWARD:
            return 10.0 * prod(shapes[0]) * shapes[2][2]
    return 0.0
