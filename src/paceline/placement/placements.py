"""Placements of a tensor along one mesh axis, and the shapes that follow.

A tensor on a mesh has one placement per axis, applied outermost axis first: the local piece of the outer axis is the
"global" tensor of the next one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import PlacementError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a term of a sum; the tensor is the sum over ranks."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Shard:
    """Dimension `dim`, seen as (blocks, ranks, rest), is split along its middle factor.

    One block is the ordinary contiguous split. Several blocks make fused projections (`qkv` has three) and flattened
    dimensions splittable without communication.
    """

    dim: int
    blocks: int = 1

    def __str__(self) -> str:
        return f"S{self.dim}" if self.blocks == 1 else f"S{self.dim}/{self.blocks}"


Placement = Replicate | Partial | Shard
REPLICATE = Replicate()
PARTIAL = Partial()


def parse_placement(text: str) -> Placement:
    """Read what `str(placement)` wrote."""
    if text == "R":
        return REPLICATE
    if text == "P":
        return PARTIAL
    match = re.fullmatch(r"S(\d+)(?:/(\d+))?", text)
    if match is None:
        raise PlacementError(f"'{text}' is no placement; write R, P, S<dim> or S<dim>/<blocks>.")
    return Shard(int(match[1]), int(match[2] or 1))


def divides(shape: Shape, placement: Placement, parts: int) -> bool:
    """Whether a tensor of `shape` can be placed so on `parts` ranks without padding; empty tensors are not split."""
    if not isinstance(placement, Shard):
        return True
    if placement.dim >= len(shape) or 0 in shape:
        return False
    return shape[placement.dim] % (placement.blocks * parts) == 0


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
