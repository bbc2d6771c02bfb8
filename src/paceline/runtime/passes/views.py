"""Operators whose result shares memory with their input: free to repeat and to move."""

from __future__ import annotations

import operator

import torch

aten = torch.ops.aten
VIEWS = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.expand.default,
    operator.getitem,
}
