"""Boxes: which part of a tensor a rank holds, and how the pieces of one layout meet those of another.

Pure arithmetic on offsets and shapes; knows nothing of tensors, files or ranks. A tensor without dimensions is a box
with an empty shape and one element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from paceline.placement.placements import Placement, Shape, Shard, local_shape


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a tensor: `offset[d] <= index[d] < offset[d] + shape[d]` in every dimension."""

    offset: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """Return the box of an entire tensor of `shape`."""
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def at_origin(self) -> bool:
        """Whether the box begins where its tensor begins."""
        return not any(self.offset)

    @property
    def index(self) -> tuple[slice, ...]:
        """The index that cuts this box out of its tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the box both share, or None when they share no element."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = zip(self._end(), other._end(), strict=True)
        shape = tuple(min(a, b) - start for (a, b), start in zip(ends, offset, strict=True))
        return Box(offset, shape) if all(length > 0 for length in shape) else None

    def inside(self, outer: Box) -> Box:
        """Return where this box is in a tensor that holds just `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def _end(self) -> Shape:
        return tuple(start + length for start, length in zip(self.offset, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{end}" for start, end in zip(self.offset, self._end(), strict=True)) + "]"


@dataclass(frozen=True)
class Patch:
    """A box of a tensor that a piece of it holds; both boxes have one shape.

    Attributes:
        whole: where it is in the tensor.
        local: where it is in the piece.
    """

    whole: Box
    local: Box

    @classmethod
    def single(cls, offset: Iterable[int], shape: Iterable[int]) -> Patch:
        """Return the only patch of a piece that is one box."""
        local = Box.whole(shape)
        return cls(Box(tuple(offset), local.shape), local)

    @classmethod
    def all_of(cls, shape: Iterable[int]) -> Patch:
        """Return the only patch of a piece that is an entire tensor."""
        whole = Box.whole(shape)
        return cls(whole, whole)

    def find(self, box: Box) -> Box:
        """Return where the piece has a box of the tensor that lies in this patch."""
        inside = box.inside(self.whole)
        return Box(tuple(a + b for a, b in zip(inside.offset, self.local.offset, strict=True)), box.shape)


def patches(shape: Shape, placements: Sequence[Placement], where: Sequence[tuple[int, int]]) -> tuple[Patch, ...]:
    """Return what a rank's piece of a tensor of `shape` consists of, in the order of the piece, as few as possible.

    A placement cuts one dimension, so a piece is a grid: along each dimension it is a row of ranges of the tensor.

    Args:
        shape: of the whole tensor.
        placements: one per axis, outermost first; each cuts the piece of the one before.
        where: (index, ranks) along each axis.

    Raises:
        PlacementError: the tensor cannot be placed so.
    """
    grid: list[list[range]] = [[range(size)] for size in shape]
    local = tuple(shape)
    for placement, (index, parts) in zip(placements, where, strict=True):
        if isinstance(placement, Shard):
            after = local_shape(local, placement, parts)
            shares = _shares(placement.sizes(local[placement.dim]), parts, index)
            grid[placement.dim] = _selected(grid[placement.dim], shares)
            local = after
    cells = itertools.product(*(zip(row, _places(row), strict=True) for row in grid))
    return tuple(_patch(cell) for cell in cells)


def _shares(blocks: Sequence[int], parts: int, index: int) -> list[range]:
    """Return the ranges that rank `index` of `parts` has of a row of blocks."""
    found, start = [], 0
    for size in blocks:
        share = size // parts
        found.append(range(start + share * index, start + share * (index + 1)))
        start += size
    return found


def _selected(row: Sequence[range], wanted: Sequence[range]) -> list[range]:
    """Return the ranges of the tensor that are found at `wanted`, positions in a row of ranges."""
    found: list[range] = []
    for want in wanted:
        for given, place in zip(row, _places(row), strict=True):
            part = given[max(want.start - place.start, 0) : max(want.stop - place.start, 0)]
            if found and part and found[-1].stop == part.start:
                found[-1] = range(found[-1].start, part.stop)
            elif part:
                found.append(part)
    return found


def _places(row: Sequence[range]) -> Iterator[range]:
    """Yield where each of a row of ranges is in the piece."""
    start = 0
    for given in row:
        yield range(start, start + len(given))
        start += len(given)


def _patch(cell: Sequence[tuple[range, range]]) -> Patch:
    whole, local = ([pair[side] for pair in cell] for side in (0, 1))
    shape = tuple(map(len, whole))
    return Patch(Box(tuple(r.start for r in whole), shape), Box(tuple(r.start for r in local), shape))
