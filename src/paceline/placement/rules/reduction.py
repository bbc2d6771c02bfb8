"""Reductions, scans and sorts along dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import MAXIMUM, PARTIAL, REPLICATE, Shard
from paceline.placement.rules.localized import size_at
from paceline.placement.rules.rule import Axes, AxisRule, Call, Move, Strategy, Written, rule
from paceline.placement.rules.words import labels_in, numbered
from paceline.program import softmax  # noqa: F401  (registers the operators)

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
ours = torch.ops.paceline
_ALONG = "along"


def _reduced(call: Call) -> set[int]:
    """Return the dimensions that a call reduces; none given means all, unless the shape says otherwise."""
    rank = len(call.inputs[0])
    dims = call.arguments.get("dim")
    if dims is None or dims == []:
        return set() if call.outputs[0] == call.inputs[0] else set(range(rank))
    return {d % rank for d in ([dims] if isinstance(dims, int) else dims)} if rank else set()


def _reduction(call: Call, *, additive: bool, linear: bool) -> AxisRule:
    """`additive`: the whole is the sum of the parts' results. `linear`: partial sums may pass through."""
    axes = numbered(len(call.inputs[0]))
    reduced = _reduced(call)
    keep = bool(call.arguments.get("keepdim"))
    result: Axes = tuple(None if d in reduced else axes[d] for d in range(len(axes)) if keep or d not in reduced)
    outputs = (result,) * len(call.outputs)
    split = labels_in([axes]) if additive else labels_in(outputs)
    return AxisRule((axes,), outputs, split, linear=((0,),) if linear else ())


@rule(aten.sum.default, aten.sum.dim_IntList)
def _sum(call: Call) -> AxisRule:
    return _reduction(call, additive=True, linear=True)


@rule(aten.count_nonzero.dim_IntList, aten.count_nonzero.default)
def _count(call: Call) -> AxisRule:
    return _reduction(call, additive=True, linear=False)


@rule(aten.histc.default)
def _histogram(call: Call) -> AxisRule:
    """Counts of a given range add up; where none is given it is that of the data."""
    axes = numbered(len(call.inputs[0]))
    given = call.arguments["min"] != call.arguments["max"]
    return AxisRule((axes,), ((None,),), labels_in([axes]) if given else frozenset())


@rule(aten.mean.default, aten.mean.dim)
def _mean(call: Call) -> AxisRule:
    return _reduction(call, additive=False, linear=True)


@rule(aten.amax.default, aten.max.default)
def _maximum(call: Call) -> AxisRule:
    """The whole is the maximum of the parts' results."""
    axes = numbered(len(call.inputs[0]))
    split = labels_in([axes])
    return replace(
        _reduction(call, additive=True, linear=False), results={(label, 0): MAXIMUM for label in split}, split=split
    )


@rule(aten.logsumexp.default)
def _logsumexp(call: Call) -> AxisRule:
    found = _reduction(call, additive=False, linear=False)
    reduced = _reduced(call)
    if len(reduced) != 1 or call.dtypes[0] != call.output_dtypes[0] or not call.dtypes[0].is_floating_point:
        return found
    (dim,) = reduced
    label, nbytes = f"d{dim}", prod(call.outputs[0] or ()) * call.dtypes[0].itemsize
    moves = tuple(Move(nbytes, source, REPLICATE) for source in (MAXIMUM, PARTIAL))
    return replace(
        found,
        split=found.split | {label},
        results={(label, 0): REPLICATE},
        written={label: Written(_write_logsumexp, moves)},
    )


def _write_logsumexp(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
    x, (dim,) = arguments["self"], arguments["dim"]
    maximum = writer.redistribute(writer.call(aten.amax.default, x, [dim], True), MAXIMUM, REPLICATE)
    infinite = writer.call(aten.eq.Scalar, writer.call(aten.abs.default, maximum), torch.inf)
    centre = writer.call(aten.masked_fill.Scalar, maximum, infinite, 0.0)
    total = writer.call(ours.exponential_sums.default, x, centre, dim)
    total = writer.redistribute(total, PARTIAL, REPLICATE)
    result = writer.call(aten.add.Tensor, centre, writer.call(aten.log.default, total))
    return [result if arguments["keepdim"] else writer.call(aten.squeeze.dim, result, dim)]


@rule(
    aten.amin.default,
    aten.aminmax.default,
    aten.min.default,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.prod.default,
    aten.prod.dim_int,
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.median.dim,
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
)
def _nonlinear(call: Call) -> AxisRule:
    return _reduction(call, additive=False, linear=False)


def rowwise(call: Call, dims: Iterable[int], linear: tuple[tuple[int, ...], ...] = ()) -> AxisRule:
    """Rule of operators that work along `dims` and treat everything else alike; all tensors have the same rank."""
    rank = len(call.inputs[0])
    kept = {d % rank for d in dims} if rank else set()
    axes: Axes = tuple(None if d in kept else label for d, label in enumerate(numbered(rank)))
    return AxisRule((axes,) * len(call.inputs), (axes,) * len(call.outputs), labels_in([axes]), linear=linear)


@rule(aten.cumsum.default)
def _cumsum(call: Call) -> AxisRule:
    """Along the dimension itself, what earlier ranks sum up to is added."""
    found = rowwise(call, [call["dim"]], linear=((0,),))
    if not call.inputs[0]:
        return found
    shape, dim = call.inputs[0], call["dim"] % len(call.inputs[0])
    assert call.output_dtypes[0] is not None
    sums = Move(2 * prod(shape) // max(shape[dim], 1) * call.output_dtypes[0].itemsize, Shard(dim), REPLICATE)
    along = Strategy((Shard(dim),), (Shard(dim),), _ALONG)
    return replace(found, extra=(along,), written={_ALONG: Written(_write_cumsum, (sums,))})


def _write_cumsum(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
    x, rank = arguments["self"], arguments["self"].meta["val"].ndim
    dim = arguments["dim"] % rank
    local = writer.call(aten.cumsum.default, x, dim, dtype=arguments["dtype"])
    value, size = local.meta["val"], size_at(x, dim)
    sums = writer.call(aten.slice.Tensor, local, dim, size - 1, size)
    sums = writer.redistribute(sums, Shard(dim), REPLICATE)
    ranks = writer.call(aten.arange.default, writer.parts, device=value.device)
    earlier = writer.call(aten.lt.Tensor, ranks, writer.coordinate())
    earlier = writer.call(aten.reshape.default, earlier, [writer.parts] + [1] * (rank - 1 - dim))
    before = writer.call(aten.where.ScalarOther, earlier, sums, 0)
    before = writer.call(aten.sum.dim_IntList, before, [dim], True, dtype=value.dtype)
    return [writer.call(aten.add.Tensor, local, before)]


@rule(
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    aten.glu.default,
    aten.glu_backward.default,
)
def _scan(call: Call) -> AxisRule:
    return rowwise(call, [call["dim"]])
