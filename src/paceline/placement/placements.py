"""Placements of a tensor along one mesh axis, and the shapes that follow.

A tensor on a mesh has one placement per axis, applied outermost axis first: the local piece of the outer axis is the
"global" tensor of the next one.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Literal

from paceline.errors import PlacementError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a term of a sum, or a candidate for a maximum; the tensor is the sum or maximum over ranks."""

    reduce: Literal["sum", "max"] = "sum"

    def __str__(self) -> str:
        return "P" if self.reduce == "sum" else "Pmax"


Blocks = int | tuple[int, ...]
"""A number of equal blocks, or the sizes of unequal ones."""


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` is a row of blocks, each of which is split evenly over the ranks.

    One block is the ordinary contiguous split. Several equal blocks, `blocks` of them, make fused projections (`qkv`
    has three) and flattened dimensions splittable without communication. Where queries, keys and values are of unequal
    size, `blocks` is the tuple of their sizes.
    """

    dim: int
    blocks: Blocks = 1

    def sizes(self, size: int) -> tuple[int, ...]:
        """Return the size of each block of a dimension of `size`."""
        return (size // self.blocks,) * self.blocks if isinstance(self.blocks, int) else self.blocks

    def order(self) -> tuple[int, tuple[int, ...]]:
        """Key by which splits are sorted: by dimension, equal blocks first."""
        return self.dim, (self.blocks,) if isinstance(self.blocks, int) else (sys.maxsize, *self.blocks)

    def __str__(self) -> str:
        if self.blocks == 1:
            return f"S{self.dim}"
        return f"S{self.dim}/{self.blocks if isinstance(self.blocks, int) else '+'.join(map(str, self.blocks))}"


Placement = Replicate | Partial | Shard
REPLICATE = Replicate()
PARTIAL = Partial()
MAXIMUM = Partial("max")


def parse_placement(text: str) -> Placement:
    """Read what `str(placement)` wrote."""
    if text == "R":
        return REPLICATE
    if text in ("P", "Pmax"):
        return PARTIAL if text == "P" else MAXIMUM
    match = re.fullmatch(r"S(\d+)(?:/(\d+(?:\+\d+)*))?", text)
    if match is None:
        raise PlacementError(
            f"'{text}' is no placement; write R, P, S<dim>, S<dim>/<blocks> or S<dim>/<size>+<size>+... ."
        )
    sizes = tuple(map(int, (match[2] or "1").split("+")))
    return Shard(int(match[1]), sizes[0] if len(sizes) == 1 else sizes)


def divides(shape: Shape, placement: Placement, parts: int) -> bool:
    """Whether a tensor of `shape` can be placed so on `parts` ranks without padding; empty tensors are not split."""
    if not isinstance(placement, Shard):
        return True
    if placement.dim >= len(shape) or 0 in shape:
        return False
    size, blocks = shape[placement.dim], placement.blocks
    if isinstance(blocks, int):
        return size % (blocks * parts) == 0
    return sum(blocks) == size and all(block % parts == 0 for block in blocks)


def local_shape(shape: Shape, placement: Placement, parts: int) -> Shape:
    """Shape of a rank's piece of a tensor of global `shape`."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    if not divides(shape, placement, parts):
        raise PlacementError(f"{tuple(shape)} cannot be placed as {placement} on {parts} ranks")
    local = list(shape)
    local[placement.dim] //= parts
    return tuple(local)


def global_shape(shape: Shape, placement: Placement, parts: int) -> Shape:
    """Shape of the global tensor whose pieces have `shape`."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    whole = list(shape)
    whole[placement.dim] *= parts
    return tuple(whole)


def merged(dim: int, sizes: tuple[int, ...]) -> Shard:
    """Return the split of a dimension into blocks of these sizes, in its simplest form."""
    if len(set(sizes)) == 1:
        return Shard(dim, len(sizes))
    return Shard(dim, sizes)
