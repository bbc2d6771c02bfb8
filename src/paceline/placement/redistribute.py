"""Redistribution: the one operator that changes where a tensor lives, and what it costs to do so."""

from __future__ import annotations

from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.placement.placements import (
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shape,
    Shard,
    global_shape,
    local_shape,
)
from paceline.placement.rules.rule import Call, MapRule, Strategy, rule


class Collective(Enum):
    """The communication that a redistribution needs; the values are the names in reports."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"


def collective_of(source: Placement, target: Placement) -> Collective | None:
    """Return the collective that leads from one placement to another; None when each rank can do it alone."""
    match source, target:
        case _ if source == target:
            return None
        case (Replicate(), _) | (_, Partial()):
            return None
        case Partial(), Replicate():
            return Collective.ALL_REDUCE
        case Partial(reduce="max"), Shard():
            return Collective.ALL_REDUCE
        case Partial(), Shard():
            return Collective.REDUCE_SCATTER
        case Shard(dim=a), Shard(dim=b) if a != b:
            return Collective.ALL_TO_ALL
    return Collective.ALL_GATHER


def can_redistribute(source: Placement, target: Placement) -> bool:
    """Whether there is a way at all: a shard is never padded to a partial sum, nor a sum taken for a maximum."""
    return not isinstance(target, Partial) or source in (REPLICATE, target)


def redistribute(x: Tensor, source: Placement, target: Placement, axis: str, parts: int) -> Tensor:
    """Stands in a placed graph for the change of `x` from `source` to `target` along a mesh axis of `parts` ranks.

    Calling it computes shapes only; the runtime replaces it by local operators and collectives.
    """
    shape = local_shape(global_shape(tuple(x.shape), source, parts), target, parts)
    return x.new_empty(shape)


@rule(redistribute)
def _over_another_axis(call: Call) -> MapRule:
    """For a later axis, the redistribution over an earlier one is an operator like any other.

    The split of the later axis is a digit inside the earlier axis's pieces; gathering or cutting along the same
    dimension changes the number of blocks.
    """
    source, target, parts = call.arguments["1"], call.arguments["2"], call.arguments["4"]
    whole = global_shape(call.inputs[0], source, parts)
    local_in, local_out = local_shape(whole, source, parts), local_shape(whole, target, parts)

    def carry(placement: Placement, ranks: int, a: Placement, b: Placement, before: Shape) -> Placement | None:
        if isinstance(placement, Partial):  # a sum of maxima is no maximum of sums
            return placement if all(not isinstance(x, Partial) or x == placement for x in (a, b)) else None
        if not isinstance(placement, Shard):
            return placement
        up = _lift(placement, ranks, a, parts, before, whole)
        return None if up is None else _lower(up, ranks, b, parts, whole)

    def localize(arguments: dict[str, Any], strategy: Strategy, ranks: int) -> dict[str, Any]:
        inner = strategy.inputs[0]
        up = _lift(inner, ranks, source, parts, local_in, whole) if isinstance(inner, Shard) else None
        return (
            {}
            if up is None
            else {"1": _within(source, parts, up, ranks, whole), "2": _within(target, parts, up, ranks, whole)}
        )

    return MapRule(
        forward=lambda placement, ranks: carry(placement, ranks, source, target, local_in),
        backward=lambda placement, ranks: carry(placement, ranks, target, source, local_out),
        localize=localize,
    )


def _within(outer: Placement, parts: int, inner: Shard, ranks: int, whole: Shape) -> Placement:
    """The placement over the earlier axis of a tensor that `inner` has cut: with fewer blocks, if those were cut."""
    if not isinstance(outer, Shard) or inner.dim != outer.dim:
        return outer
    assert isinstance(inner.blocks, int) and isinstance(outer.blocks, int), "unequal blocks are not cut further"
    stride = whole[inner.dim] // (inner.blocks * ranks)
    block = whole[inner.dim] // outer.blocks
    return Shard(outer.dim, outer.blocks // ranks) if stride % block == 0 else outer


def _lift(inner: Shard, ranks: int, outer: Placement, parts: int, local: Shape, whole: Shape) -> Shard | None:
    """The split of a piece, as a split of the tensor that the pieces make."""
    if not isinstance(outer, Shard) or inner.dim != outer.dim:
        return inner
    if not isinstance(inner.blocks, int) or not isinstance(outer.blocks, int):
        return None
    stride = local[inner.dim] // (inner.blocks * ranks)  # elements between neighbours of the inner digit
    rest = whole[inner.dim] // (outer.blocks * parts)  # contiguous elements that an outer piece owns
    if rest % (stride * ranks) == 0:
        lifted = stride
    elif stride % rest == 0:
        lifted = stride * parts
    else:
        return None
    return _with_stride(inner.dim, whole[inner.dim], lifted, ranks)


def _lower(inner: Shard, ranks: int, outer: Placement, parts: int, whole: Shape) -> Shard | None:
    """The split of a whole tensor, as a split of one outer piece of it."""
    if not isinstance(outer, Shard) or inner.dim != outer.dim:
        return inner
    if not isinstance(inner.blocks, int) or not isinstance(outer.blocks, int):
        return None
    stride = whole[inner.dim] // (inner.blocks * ranks)
    rest = whole[inner.dim] // (outer.blocks * parts)
    if rest % (stride * ranks) == 0:
        lowered = stride
    elif stride % (rest * parts) == 0:
        lowered = stride // parts
    else:
        return None
    return _with_stride(inner.dim, whole[inner.dim] // parts, lowered, ranks)


def _with_stride(dim: int, size: int, stride: int, ranks: int) -> Shard | None:
    if stride == 0 or size % (stride * ranks):
        return None
    return Shard(dim, size // (stride * ranks))


def redistribution_bytes(value: Tensor, source: Placement, parts: int) -> int:
    """Bytes of the tensor that a redistribution moves: the whole one with respect to its axis."""
    return prod(global_shape(tuple(value.shape), source, parts)) * value.element_size()


def is_redistribution(node: torch.fx.Node) -> bool:
    """Whether the node is a call of `redistribute`."""
    return node.op == "call_function" and node.target is redistribute


def redistribution_of(node: torch.fx.Node) -> tuple[Any, Placement, Placement, str, int]:
    """Return the arguments of a redistribution: tensor node, source, target, axis, ranks on the axis."""
    arguments: tuple[Any, ...] = node.args
    x, source, target, axis, parts = arguments
    return x, source, target, axis, parts
