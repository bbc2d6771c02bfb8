"""Values of calls of operators, drawn at random."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Calls = Iterator[tuple[Any, ...]]
"""Each an operator, its arguments, and maybe a dictionary of keywords."""


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def bools(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.5
