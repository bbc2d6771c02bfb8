"""Parameters of which an axis splits less than it could, because a dimension does not divide."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import lcm

from paceline.placement.intents import Parameters, intent_of
from paceline.placement.placements import REPLICATE, Shard
from paceline.plan import Axis, Mesh
from paceline.planner.explanation import Held, Uneven

_FEATURES = 2
"""How many dimensions of a matrix or kernel count features; the rest are places of a kernel, which nobody would pad."""
_LARGE = 1024
_ROUND = 64
"""Sizes of large dimensions that are multiples of this one suit kernels of products."""


def uneven(parameters: Iterable[Held], mesh: Mesh, pinned: Mapping[str, Collection[str]]) -> Iterator[Uneven]:
    """Yield what the sizes of parameters cost: what stays whole, or is split along a smaller dimension.

    Args:
        parameters: as a rank holds them.
        mesh: its axes.
        pinned: by axis, the names of parameters that live where the user said.
    """
    for held in parameters:
        for position, (axis, parts) in enumerate(mesh.axes):
            if parts == 1 or held.name in pinned[axis]:
                continue
            dim = max(range(len(held.shape[:_FEATURES])), key=held.shape.__getitem__, default=None)
            placement = held.placements[position]
            if dim is None or placement == Shard(dim) or not _loses(Axis(axis), held, position):
                continue
            divisor = parts
            for earlier, (_, count) in zip(held.placements[:position], mesh.axes, strict=False):
                divisor *= count if isinstance(earlier, Shard) and earlier.dim == dim else 1
            size = held.shape[dim]
            if divisor < size and size % divisor:
                yield Uneven(held.name, held.shape, axis, placement, dim, divisor, _fitting(size, divisor))


def _loses(axis: Axis, held: Held, position: int) -> bool:
    """Whether the axis would split the parameter along its largest dimension, or at all, if it could."""
    match intent_of(axis, split_batch=True).parameters:
        case Parameters.SHARDED:  # along any dimension
            return held.placements[position] == REPLICATE
        case Parameters.SPLIT:
            return len(held.shape) > 1
    return False


def _fitting(size: int, divisor: int) -> tuple[int, ...]:
    """The next sizes that divide."""
    units = (divisor, lcm(divisor, _ROUND)) if size >= _LARGE else (divisor,)
    return tuple(dict.fromkeys(-(-size // unit) * unit for unit in units))
