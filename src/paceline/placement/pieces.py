"""Cutting real tensors into the pieces of a placement, and joining them again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor

from paceline.placement.placements import Partial, Placement, Replicate, Shape, Shard, global_shape, local_shape


def _of_blocks(shape: Shape, placement: Shard, parts: int, index: int) -> list[slice]:
    """Return the part of each unequal block that rank `index` holds."""
    found, start = [], 0
    for size in placement.sizes(shape[placement.dim]):
        found.append(slice(start + size // parts * index, start + size // parts * (index + 1)))
        start += size
    return found


def take(tensor: Tensor, placement: Placement, parts: int, index: int) -> Tensor:
    """Return the piece of rank `index`, contiguous (kernels such as layer norm's backward assume it).

    A replicated tensor taken as a partial sum stays whole on rank 0 and is zero elsewhere.
    """
    match placement:
        case Replicate():
            return tensor
        case Partial(reduce="max"):
            return tensor
        case Partial():
            return tensor if index == 0 else torch.zeros_like(tensor)
        case Shard():
            shape = local_shape(tuple(tensor.shape), placement, parts)
            if not isinstance(placement.blocks, int):
                rows = _of_blocks(tuple(tensor.shape), placement, parts, index)
                cuts = [tensor.narrow(placement.dim, row.start, row.stop - row.start) for row in rows]
                return torch.cat(cuts, placement.dim)
            outer = prod(shape[: placement.dim]) * placement.blocks
            rest = tensor.numel() // (outer * parts)
            return tensor.reshape(outer, parts, rest)[:, index].reshape(shape).contiguous()


def join(pieces: Sequence[Tensor], placement: Placement) -> Tensor:
    """Return the global tensor from the pieces of all ranks of an axis; the inverse of `take`."""
    match placement:
        case Replicate():
            return pieces[0]
        case Partial():
            return reduce(torch.add if placement.reduce == "sum" else torch.maximum, pieces)
        case Shard():
            local = tuple(pieces[0].shape)
            if not isinstance(placement.blocks, int):
                sizes = [size // len(pieces) for size in placement.blocks]
                cuts = [torch.split_with_sizes(piece, sizes, placement.dim) for piece in pieces]
                return torch.cat([cut[block] for block in range(len(sizes)) for cut in cuts], placement.dim)
            outer = prod(local[: placement.dim]) * placement.blocks
            stacked = torch.stack([piece.reshape(outer, -1) for piece in pieces], dim=1)
            return stacked.reshape(global_shape(local, placement, len(pieces)))
