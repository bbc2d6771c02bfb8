"""Where tensors are put that arrive: where the receiver wants them, or in memory that a connection keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.wire.codec import nbytes
from paceline.exchange.wire.frame import Frame, Meta, Placing

_ALIGNMENT: Final = 64
_SMALLEST: Final = 64 << 10
_PATIENCE: Final = 64
"""Frames after which memory that none of them needed half of is given back."""


def offsets(metas: Sequence[Meta]) -> tuple[list[int], int]:
    """Return where tensors lie one after the other, each at a multiple of 64 bytes, and what all of them need."""
    at, starts = 0, []
    for meta in metas:
        starts.append(at)
        at += -(-nbytes(meta) // _ALIGNMENT) * _ALIGNMENT
    return starts, at


def tensors_in(memory: Tensor, metas: Sequence[Meta], starts: Sequence[int]) -> list[Tensor]:
    """Return tensors that lie in memory. memory: [n] uint8."""
    return [
        memory[start : start + nbytes(meta)].view(meta.dtype).view(meta.shape)
        for meta, start in zip(metas, starts, strict=True)
    ]


class Memory:
    """Memory for the tensors of one frame at a time. It grows as needed, and shrinks when little of it is used."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)
        self._most, self._frames = 0, 0

    def tensors(self, metas: Sequence[Meta]) -> list[Tensor]:
        """Return tensors to receive into; those of the call before are not valid any more."""
        starts, total = offsets(metas)
        self._most, self._frames = max(self._most, total), self._frames + 1
        if self._frames == _PATIENCE:
            if 2 * self._most < self._held.numel() > _SMALLEST:
                self._held = torch.empty(0, dtype=torch.uint8)
            self._most, self._frames = total, 0
        if total > self._held.numel():
            self._held = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._held = torch.empty(max(total, _SMALLEST), dtype=torch.uint8)
        return tensors_in(self._held, metas, starts)


def placed(place: Placing | None, frame: Frame, metas: Sequence[Meta]) -> list[Tensor] | None:
    """Return where the receiver wants the tensors of a frame, or None.

    Raises:
        ExchangeError: they do not fit there.
    """
    given = place(frame, metas) if place is not None else None
    if given is None:
        return None
    if len(given) != len(metas):
        raise ExchangeError(f"a frame has {len(metas)} tensors, and there are places for {len(given)}.")
    for number, (tensor, meta) in enumerate(zip(given, metas, strict=True)):
        fits = tensor.dtype == meta.dtype and tensor.nbytes == nbytes(meta)
        if not (fits and tensor.is_contiguous() and tensor.device.type == "cpu"):
            raise ExchangeError(
                f"tensor {number} of a frame is {meta.dtype}{list(meta.shape)}, and its place is "
                f"{tensor.dtype}{list(tensor.shape)} on {tensor.device} with strides {tensor.stride()}; a place is "
                "contiguous, on the CPU, and has as many elements of the same type."
            )
    return [tensor.detach() for tensor in given]
