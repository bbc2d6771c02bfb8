"""Cutting real tensors into the pieces of a placement, and joining them again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor

from paceline.placement.placements import Partial, Placement, Replicate, Shard, global_shape, local_shape


def split_view(tensor: Tensor, placement: Shard, parts: int) -> Tensor:
    """View a global tensor as [outer * blocks, parts, rest]; the middle index is the rank that owns an element."""
    shape = tensor.shape
    outer = prod(shape[: placement.dim]) * placement.blocks
    return tensor.reshape(outer, parts, tensor.numel() // (outer * parts))


def take(tensor: Tensor, placement: Placement, parts: int, index: int) -> Tensor:
    """Return the piece of rank `index`, contiguous (kernels such as layer norm's backward assume it).

    A replicated tensor taken as a partial sum stays whole on rank 0 and is zero elsewhere.
    """
    match placement:
        case Replicate():
            return tensor
        case Partial():
            return tensor if index == 0 else torch.zeros_like(tensor)
        case Shard():
            shape = local_shape(tuple(tensor.shape), placement, parts)
            return split_view(tensor, placement, parts)[:, index].reshape(shape).contiguous()


def join(pieces: Sequence[Tensor], placement: Placement) -> Tensor:
    """Return the global tensor from the pieces of all ranks of an axis; the inverse of `take`."""
    match placement:
        case Replicate():
            return pieces[0]
        case Partial():
            return reduce(torch.add, pieces)
        case Shard():
            local = tuple(pieces[0].shape)
            outer = prod(local[: placement.dim]) * placement.blocks
            stacked = torch.stack([piece.reshape(outer, -1) for piece in pieces], dim=1)
            return stacked.reshape(global_shape(local, placement, len(pieces)))
