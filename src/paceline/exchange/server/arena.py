"""Memory for answers, used again and again: pages that were touched before cost nothing to write."""

from __future__ import annotations

import torch
from torch import Tensor


class Arena:
    """Tensors that are valid until `clear`."""

    def __init__(self) -> None:
        self._held: dict[torch.dtype, Tensor] = {}
        self._used: dict[torch.dtype, int] = {}

    def clear(self) -> None:
        """All that was taken may be taken again."""
        self._used.clear()

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return a tensor of any content."""
        count = torch.Size(shape).numel()
        begin = self._used.get(dtype, 0)
        held = self._held.get(dtype)
        if held is None or begin + count > len(held):
            # What was taken from the old one stays valid: its tensors hold it.
            held = self._held[dtype] = torch.empty(max(count, 2 * begin, 1024), dtype=dtype)
            begin = 0
        self._used[dtype] = begin + count
        return held[begin : begin + count].view(shape)
