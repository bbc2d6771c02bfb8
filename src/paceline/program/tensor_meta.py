"""Tensors that do not exist: shape, strides, dtype and device, as `node.meta["val"]` of a graph read from disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@dataclass(frozen=True)
class TensorMeta:
    """What is known of a tensor before it exists; read like one. Costs nothing, where a fake tensor imports Dynamo."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel() * self.dtype.itemsize

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def size(self) -> torch.Size:
        """Return the shape."""
        return self.shape

    def stride(self) -> tuple[int, ...]:
        """Return the stride of each dimension, in elements."""
        return self.strides

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Return whether the elements are floating-point numbers."""
        return self.dtype.is_floating_point


def fake_tensors(mode: FakeTensorMode) -> Callable[[TensorMeta], Tensor]:
    """Return the `values` for `graph_from_json` that make fake tensors of `mode`, as Inductor and shape rules want.

    They share no storage, also where the values of the written graph were views of each other.
    """

    def make(meta: TensorMeta) -> Tensor:
        # Five times quicker than torch.empty_strided under the mode, which a graph of thousands of nodes notices.
        empty = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device="meta")
        return FakeTensor(mode, empty, meta.device)

    return make
