"""Resizing of images stays one operator in a program.

While tracing, PyTorch would take it apart into indices of rows and columns and sums of picked pixels, four of them for
each that is made: more memory than its own kernels need, and nothing that shows that a pixel depends on its neighbours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

aten = torch.ops.aten
_NAMES = (
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
    *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)
_TAKEN_APART = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
"""Where PyTorch's tracing has an implementation in Python that takes precedence over the operator's own."""


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Let tracing inside keep the operators that resize."""
    operators: list[OpOverload] = [getattr(getattr(aten, name), form) for name in _NAMES for form in ("default", "vec")]
    before = [dict(operator.py_kernels) for operator in operators]
    try:
        for operator, kernels in zip(operators, before, strict=True):
            _set(operator, {key: kernel for key, kernel in kernels.items() if key not in _TAKEN_APART})
        yield
    finally:
        for operator, kernels in zip(operators, before, strict=True):
            _set(operator, kernels)


def _set(operator: OpOverload, kernels: Mapping[DispatchKey, Callable[..., Any]]) -> None:
    operator.py_kernels.clear()
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()
