"""Reductions, scans and sorts along dimensions."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.placement.rules.rule import Axes, AxisRule, Call, rule
from paceline.placement.rules.words import labels_in, numbered

aten = torch.ops.aten


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


@rule(aten.mean.default, aten.mean.dim)
def _mean(call: Call) -> AxisRule:
    return _reduction(call, additive=False, linear=True)


@rule(
    aten.amax.default,
    aten.amin.default,
    aten.aminmax.default,
    aten.max.default,
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
    aten.logsumexp.default,
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
    return rowwise(call, [call["dim"]], linear=((0,),))


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
