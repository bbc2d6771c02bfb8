"""Where tensors are put that arrive: where the receiver wants them, or in memory that a connection keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from mmap import mmap
from typing import Final, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.wire.codec import NUMPY_TYPES, nbytes
from paceline.exchange.wire.frame import Frame, Meta, Placing

Held: TypeAlias = memoryview | mmap

_ALIGNMENT: Final = 64
_SMALLEST: Final = 64 << 10
_PATIENCE: Final = 64
"""Frames after which memory that none of them needed half of is given back."""


def aligned(counts: Iterable[int]) -> tuple[list[int], int]:
    """Return where parts of so many bytes begin, each at a multiple of 64, and what all of them need."""
    at, starts = 0, []
    for count in counts:
        starts.append(at)
        at += -(-count // _ALIGNMENT) * _ALIGNMENT
    return starts, at


def offsets(metas: Sequence[Meta]) -> tuple[list[int], int]:
    """Return where tensors lie one after the other, and what all of them need, in bytes."""
    return aligned(map(nbytes, metas))


def tensors_in(memory: Held, metas: Sequence[Meta], starts: Sequence[int]) -> list[Tensor]:
    """Return tensors that lie in memory."""
    return [_tensor(memory, meta, start) for meta, start in zip(metas, starts, strict=True)]


def _tensor(memory: Held, meta: Meta, start: int) -> Tensor:
    dtype, shape = meta
    if dtype in NUMPY_TYPES:
        return torch.from_numpy(np.ndarray(shape, NUMPY_TYPES[dtype], memory, start))
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(shape)


class Memory:
    """Memory for the tensors of one frame at a time. It grows as needed, and shrinks when little of it is used."""

    def __init__(self) -> None:
        self._held = memoryview(bytearray())
        self._most, self._frames = 0, 0

    def tensors(self, metas: Sequence[Meta]) -> tuple[list[Tensor], list[memoryview]]:
        """Return tensors to receive into, and where those that are not empty lie.

        Those of the call before are not valid any more.

        Raises:
            ExchangeError: there is not as much memory.
        """
        counts = [nbytes(meta) for meta in metas]
        starts, total = aligned(counts)
        self._most, self._frames = max(self._most, total), self._frames + 1
        if self._frames == _PATIENCE:
            if 2 * self._most < len(self._held) > _SMALLEST:
                self._held = memoryview(bytearray())
            self._most, self._frames = total, 0
        if total > len(self._held):
            self._held = memoryview(bytearray())  # the old one goes first
            self._held = _allocated(max(total, _SMALLEST), sum(counts))
        pieces = [self._held[start : start + count] for start, count in zip(starts, counts, strict=True) if count]
        return tensors_in(self._held, metas, starts), pieces


def _allocated(count: int, announced: int) -> memoryview:
    """Return `count` bytes for `announced` ones, which lie a little apart."""
    try:
        return torch.empty(count, dtype=torch.uint8).numpy().data
    except RuntimeError:
        no_room(announced)


def no_room(count: int) -> NoReturn:
    """Say that there is no memory for the tensors of a frame.

    Raises:
        ExchangeError: always.
    """
    raise ExchangeError(f"a frame announces {count} bytes of tensors, and there is no memory for them.")


def placed(place: Placing | None, frame: Frame, metas: Sequence[Meta]) -> list[Tensor] | None:
    """Return where the receiver wants the tensors of a frame, or None.

    Raises:
        ExchangeError: they do not fit there.
    """
    given = place(frame, metas) if place is not None else None
    if given is None:
        return None
    check_fit(given, metas)
    return [tensor.detach() for tensor in given]


def check_fit(given: Sequence[Tensor], metas: Sequence[Meta]) -> None:
    """Check that places are such that tensors can be received there.

    Raises:
        ExchangeError: they are not.
    """
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
