"""Operators that a CPU has quicker equals of: the same bits, as sums have the same order."""

from __future__ import annotations

import torch
from torch import Tensor

_NARROW = 32
"""Columns times threads below which one thread that adds rows up is quicker than several that look for their own."""


def embedding_dense_backward(gradient: Tensor, indices: Tensor, rows: int, padding: int, scaled: bool) -> Tensor:
    """Return what the operator of ATen does, which makes a tensor of each row: several times slower for short rows.

    Args:
        gradient: [..., width].
        indices: [...] of rows.
        rows: of the result.
        padding: a row that has no gradient; -1: none.
        scaled: divide by how often a row occurs.
    """
    width, threads = gradient.shape[-1], torch.get_num_threads()
    exact = gradient.dtype in (torch.float32, torch.float64)  # the others are rounded on the way
    if gradient.device.type != "cpu" or scaled or not exact or (threads > 1 and width * threads > _NARROW):
        found: Tensor = torch.ops.aten.embedding_dense_backward(gradient, indices, rows, padding, scaled)
        return found
    sums = gradient.new_zeros(rows, width).index_add_(0, indices.reshape(-1), gradient.reshape(-1, width))
    if padding >= 0:
        sums[padding] = 0
    return sums
