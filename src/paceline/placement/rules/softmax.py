"""Softmax and cross-entropy. A split of the classes costs small all-reduces: of a maximum and of a sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import MAXIMUM, PARTIAL, REPLICATE, Placement, Shard
from paceline.placement.rules.localized import local_index, size_at
from paceline.placement.rules.reduction import rowwise
from paceline.placement.rules.rule import Axes, AxisRule, Call, Label, Move, Strategy, Written, rule
from paceline.placement.rules.words import labels_in, numbered
from paceline.program import softmax  # noqa: F401  (registers the operators)

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
ours = torch.ops.paceline
Arguments = Mapping[str, Any]
_CLASSES = "classes"


def _axes(call: Call) -> tuple[Axes, Axes]:
    """Axes of a tensor with classes along `dim`, and of its maxima and sums."""
    rank = len(call.inputs[0])
    axes = numbered(rank)
    dim = call["dim"] % max(rank, 1)
    return (
        tuple(_CLASSES if d == dim else label for d, label in enumerate(axes)),
        tuple(None if d == dim else label for d, label in enumerate(axes)),
    )


def _moves(call: Call, *sources: Placement) -> tuple[Move, ...]:
    """Reductions of a number for each row."""
    shape, dim = call.inputs[0], call["dim"]
    nbytes = prod(shape) // max(shape[dim], 1) * call.dtypes[0].itemsize
    return tuple(Move(nbytes, source, REPLICATE) for source in sources)


def _same_type(call: Call) -> bool:
    """Whether half precision is not left for float32 within the call, as GPUs may."""
    return bool(call.inputs[0]) and call.dtypes[0] == call.output_dtypes[0]


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def _softmax(call: Call) -> AxisRule:
    if not _same_type(call):
        return rowwise(call, [call["dim"]])
    axes, _ = _axes(call)
    write = {aten._log_softmax.default: _write_log_softmax}.get(call.target, _write_softmax)
    written: dict[Label, Written] = {_CLASSES: Written(write, _moves(call, MAXIMUM, PARTIAL))}
    return AxisRule((axes,), (axes,), labels_in([axes]), written=written)


def _maximum(writer: Writer, x: Node, dim: int) -> Node:
    return writer.redistribute(writer.call(aten.amax.default, x, [dim], True), MAXIMUM, REPLICATE)


def _write_log_softmax(writer: Writer, arguments: Arguments, strategy: Strategy) -> Sequence[Node]:
    x, dim = arguments["self"], arguments["dim"]
    maximum = _maximum(writer, x, dim)
    total = writer.call(ours.exponential_sums.default, x, maximum, dim)
    total = writer.redistribute(total, PARTIAL, REPLICATE)
    return [writer.call(ours.log_softmax_apply.default, x, maximum, total, dim)]


def _write_softmax(writer: Writer, arguments: Arguments, strategy: Strategy) -> Sequence[Node]:
    x, dim = arguments["self"], arguments["dim"]
    maximum = _maximum(writer, x, dim)
    both = writer.call(ours.exponentials.default, x, maximum, dim)
    total = writer.redistribute(writer.item(both, 1), PARTIAL, REPLICATE)
    made = writer.call(aten.mul.Tensor, writer.item(both, 0), writer.call(aten.reciprocal.default, total))
    if "half_to_float" not in arguments:  # the safe one: a row without a finite number is zero
        made = writer.call(aten.masked_fill.Scalar, made, writer.call(aten.eq.Scalar, maximum, -torch.inf), 0.0)
    dtype = x.meta["val"].dtype
    return [made if made.meta["val"].dtype == dtype else writer.call(aten._to_copy.default, made, dtype=dtype)]


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(call: Call) -> AxisRule:
    if not _same_type(call) or len(set(call.dtypes)) > 1:
        return rowwise(call, [call["dim"]], linear=((0,),))
    axes, _ = _axes(call)
    write = _write_softmax_grad(call.target is aten._log_softmax_backward_data.default)
    written: dict[Label, Written] = {_CLASSES: Written(write, _moves(call, PARTIAL))}
    return AxisRule((axes, axes), (axes,), labels_in([axes]), linear=((0,),), written=written)


def _write_softmax_grad(log: bool) -> Any:
    def write(writer: Writer, arguments: Arguments, strategy: Strategy) -> Sequence[Node]:
        grad, result, dim = arguments["grad_output"], arguments["output"], arguments["dim"]
        terms = grad if log else writer.call(aten.mul.Tensor, grad, result)
        half = terms.meta["val"].dtype in (torch.float16, torch.bfloat16)
        total = writer.call(aten.sum.dim_IntList, terms, [dim], True, dtype=torch.float32 if half else None)
        total = writer.redistribute(total, PARTIAL, REPLICATE)
        return [writer.call(ours.softmax_grad.default, grad, result, total, dim, log)]

    return write


@rule(ours.exponentials.default)
def _exponentials(call: Call) -> AxisRule:
    axes, row = _axes(call)
    return AxisRule((axes, row), (axes, row), labels_in([axes]))


@rule(ours.exponential_sums.default)
def _exponential_sums(call: Call) -> AxisRule:
    axes, row = _axes(call)
    return AxisRule((axes, row), (row,), labels_in([axes]))


@rule(ours.log_softmax_apply.default)
def _log_softmax_apply(call: Call) -> AxisRule:
    axes, row = _axes(call)
    return AxisRule((axes, row, row), (axes,), labels_in([axes]))


@rule(ours.softmax_grad.default)
def _softmax_grad(call: Call) -> AxisRule:
    axes, row = _axes(call)
    return AxisRule((axes, axes, row), (axes,), labels_in([axes]), linear=((0, 2),))


@rule(ours.cross_entropy_grad.default)
def _cross_entropy_grad(call: Call) -> AxisRule:
    """Each rank takes `scale` from the classes that it has."""
    classes = Strategy((Shard(1), REPLICATE, REPLICATE, REPLICATE), (Shard(1),), _CLASSES)
    return AxisRule(
        (("n", None), ("n",), ("n",), ("n",)),
        (("n", None),),
        frozenset("n"),
        linear=((1, 3),),
        extra=(classes,),
        written={_CLASSES: Written(_write_cross_entropy_grad)},
    )


def _write_cross_entropy_grad(writer: Writer, arguments: Arguments, strategy: Strategy) -> Sequence[Node]:
    exponentials, target = arguments["exponentials"], arguments["target"]
    local = local_index(writer, target, size_at(exponentials, 1), -1)
    call = ours.cross_entropy_grad.default
    return [writer.call(call, exponentials, arguments["factor"], local, arguments["scale"])]


@rule(ours.local_index.default)
def _local_index(call: Call) -> AxisRule:
    """For another axis the piece is the whole."""
    axes = numbered(len(call.inputs[0]))
    return AxisRule((axes, ()), (axes,), labels_in([axes]))
