"""How a split survives a change of shape.

A shard is one digit of the row-major index of an element: index = ... + digit * stride + ..., with as many values as
there are ranks. `view`, `unsqueeze` and `squeeze` keep the index, so they keep the digit; only its name changes.
"""

from __future__ import annotations

from math import prod

from paceline.placement.placements import Placement, Shape, Shard


def _stride(shape: Shape, shard: Shard, parts: int) -> int:
    return prod(shape[shard.dim + 1 :]) * (shape[shard.dim] // (shard.blocks * parts))


def _shard_with_stride(shape: Shape, stride: int, parts: int) -> Shard | None:
    inner = 1
    for dim in reversed(range(len(shape))):
        size = shape[dim]
        span = inner * size
        if size > 1 and stride % inner == 0 and span % (stride * parts) == 0 and stride * parts <= span:
            return Shard(dim, span // (stride * parts))
        inner = span
    return None


def through_view(before: Shape, after: Shape, placement: Placement, parts: int) -> Placement | None:
    """Placement of a tensor of shape `before` once it is viewed as `after`; None when the view mixes the split."""
    if not isinstance(placement, Shard):
        return placement
    stride = _stride(before, placement, parts)
    return _shard_with_stride(after, stride, parts) if stride else None
