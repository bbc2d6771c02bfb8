"""Our own operator for indices into a dimension of which a rank holds a piece.

`torch.ops.paceline.local_index(index, coordinate, size, total, outside, wrap)`: where the piece number `coordinate` of
`size` rows has the row, the row's place in the piece; where another of the `total` rows is meant, `outside`. What means
no row at all stays as it is, so that the operator that reads the result refuses it as it would refuse the original.
`wrap` counts negative indices from the end first, for operators that do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped in torch
_LIBRARY.define(
    "local_index(Tensor index, Tensor coordinate, int size, int total, int outside, bool wrap=False) -> Tensor"
)


def _local_index(index: Tensor, coordinate: Tensor, size: int, total: int, outside: int, wrap: bool = False) -> Tensor:
    row = torch.where(index < 0, index + total, index) if wrap else index
    local = row - coordinate * size
    elsewhere = torch.where((row >= 0) & (row < total), outside, index)
    return torch.where((local >= 0) & (local < size), local, elsewhere)


_LIBRARY.impl("local_index", _local_index, "CompositeExplicitAutograd")
torch.library.register_fake("paceline::local_index", lambda index, *_: torch.empty_like(index), lib=_LIBRARY)
