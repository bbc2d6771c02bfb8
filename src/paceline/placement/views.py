"""How a split survives a change of shape.

A shard is one digit of the row-major index of an element: index = ... + digit * stride + ..., with as many values as
there are ranks. `view`, `unsqueeze` and `squeeze` keep the index, so they keep the digit; only its name changes.
"""

from __future__ import annotations

from math import prod

from paceline.placement.placements import Placement, Shape, Shard


def _stride(shape: Shape, dim: int, blocks: int, parts: int) -> int:
    return prod(shape[dim + 1 :]) * (shape[dim] // (blocks * parts))


def _shard_with_stride(shape: Shape, stride: int, parts: int) -> Shard | None:
    inner = 1
    for dim in reversed(range(len(shape))):
        size = shape[dim]
        span = inner * size
        if size > 1 and stride % inner == 0 and span % (stride * parts) == 0 and stride * parts <= span:
            return Shard(dim, span // (stride * parts))
        inner = span
    return None


def _with_segments(before: Shape, after: Shape, dim: int, segments: tuple[int, ...], parts: int) -> Shard | None:
    """Unequal blocks survive where a dimension ends at the same place, such as heads taken out of a projection."""
    inner = prod(before[dim + 1 :])
    for other in range(len(after)):
        unit = prod(after[other + 1 :])
        if after[other] * unit == before[dim] * inner and all(size * inner % (unit * parts) == 0 for size in segments):
            return Shard(other, tuple(size * inner // unit for size in segments))
    return None


def through_view(before: Shape, after: Shape, placement: Placement, parts: int) -> Placement | None:
    """Placement of a tensor of shape `before` once it is viewed as `after`; None when the view mixes the split."""
    if not isinstance(placement, Shard):
        return placement
    if not isinstance(placement.blocks, int):
        return _with_segments(before, after, placement.dim, placement.blocks, parts)
    stride = _stride(before, placement.dim, placement.blocks, parts)
    return _shard_with_stride(after, stride, parts) if stride else None
