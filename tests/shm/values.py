"""What tensors hold and how they lie in memory, drawn from seeds that all ranks share, and how results are compared.

Every rank can make the inputs of every other one, so what a call must give is known without a word between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.shm import Exchange

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*INTEGERS, *FLOATS, torch.bool, torch.complex64)

_BITWISE = {ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or, ReduceOp.BXOR: torch.bitwise_xor}
_COMPARING = {ReduceOp.MIN: torch.minimum, ReduceOp.MAX: torch.maximum}
_EXACT = {**_BITWISE, **_COMPARING}


class Layout(Enum):
    """How a tensor lies in memory."""

    PLAIN = 0
    SHIFTED = 1  # one element into its storage, so aligned to its element only
    STEPPED = 2  # every second element
    TRANSPOSED = 3  # dense, but columns first; with fewer than two dimensions as STEPPED
    SHARED = 4  # where the other ranks can read it
    SHARED_SHIFTED = 5


PRIVATE = (Layout.PLAIN, Layout.SHIFTED, Layout.STEPPED, Layout.TRANSPOSED)

Allocate = Callable[[int, torch.dtype], torch.Tensor]


def lay(values: torch.Tensor, layout: Layout, allocate: Allocate | None = None) -> torch.Tensor:
    """Return `values` copied into memory of this layout; `allocate` returns shared memory."""
    shape, count = values.shape, values.numel()
    if layout is Layout.PLAIN:
        return values.clone()
    if layout in (Layout.SHARED, Layout.SHARED_SHIFTED):
        assert allocate is not None
        shift = int(layout is Layout.SHARED_SHIFTED)
        there = allocate(count + shift, values.dtype)[shift:].view(shape)
    elif layout is Layout.SHIFTED:
        there = values.new_zeros(count + 1)[1:].view(shape)
    elif layout is Layout.TRANSPOSED and values.dim() > 1:
        there = values.new_zeros(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    else:
        there = values.new_zeros(*shape, 2)[..., 0]
    return there.copy_(values)


@dataclass(frozen=True)
class Spec:
    """A tensor of each rank, or several: shape, type, and the seed of what is in them.

    Attributes:
        bits: any bits, NaNs among them, for calls that copy; otherwise numbers that can be reduced.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    bits: bool = True

    def values(self, rank: int, part: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return what `rank` contributes; `part` tells several tensors of one rank apart."""
        shape = self.shape if shape is None else shape
        generator = torch.Generator().manual_seed(self.seed + 1009 * rank + 9176 * part)
        count = 1
        for extent in shape:
            count *= extent
        if self.dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator, dtype=torch.bool)
        if not self.bits and self.dtype.is_complex:
            return torch.view_as_complex(torch.rand((*shape, 2), generator=generator) - 0.5)
        if not self.bits and self.dtype.is_floating_point:
            sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
            return ((torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5) * sign).to(self.dtype)
        size = count * self.dtype.itemsize
        words = torch.randint(-(1 << 63), (1 << 63) - 1, (-(-size // 8),), generator=generator, dtype=torch.int64)
        return words.view(torch.uint8)[:size].view(self.dtype).view(shape)

    def layout(self, rank: int, part: int, allowed: Sequence[Layout]) -> Layout:
        """Return how this tensor of `rank` lies: any of `allowed`, and not the same on all ranks."""
        return allowed[(self.seed * 2654435761 + rank * 40503 + part * 69069 >> 5) % len(allowed)]


@dataclass(frozen=True)
class Want:
    """What a call must give: a tensor, or an object.

    Attributes:
        slack: how far elements may be off; None says that every bit must agree.
    """

    value: Any
    slack: torch.Tensor | None = None

    def difference(self, got: Any) -> str | None:
        """Return in what `got` differs; None if it does not."""
        want = self.value
        if not isinstance(want, torch.Tensor):
            return None if want == got else f"got {got!r}, want {want!r}"
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"got {got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"
        wrong = bits(got) != bits(want) if self.slack is None else ~(_wide(got - want).abs() <= self.slack)
        if not wrong.any():
            return None
        wrong = wrong.view(-1) if self.slack is not None else wrong.view(want.numel(), -1).any(1)
        at = int(wrong.nonzero()[0])
        return (
            f"{int(wrong.sum())} of {want.numel()} elements differ, first at {at}: got "
            f"{got.reshape(-1)[at].item()!r}, want {want.reshape(-1)[at].item()!r}"
        )


def reduced(op: ReduceOp.RedOpType, terms: Sequence[torch.Tensor]) -> Want:
    """Return the reduction of `terms` in their order.

    Two terms, integers and comparisons are exact (halving is too). Otherwise each addition may round once, whatever
    their order and whether rounded to the type itself or to a wider one: (n - 1) * eps / 2 of the sum of magnitudes.
    """
    first, count = terms[0], len(terms)
    if op in _EXACT or not (first.dtype.is_floating_point or first.dtype.is_complex):
        total = first
        for term in terms[1:]:
            total = _combined(op, total, term)
        return Want(total)
    wide = [_wide(term) for term in terms]
    # Of float64 no tensor type is wider, and its own roundings would be taken for those of the call.
    exact = [np.asarray(term.numpy(), np.longdouble) for term in terms] if first.dtype == torch.float64 else wide
    total = exact[0]
    for term in exact[1:]:
        total = total * term if op == ReduceOp.PRODUCT else total + term
    if op == ReduceOp.AVG:
        total = total / count
    total = total if isinstance(total, torch.Tensor) else torch.as_tensor(np.asarray(total, np.float64))
    value = total.to(first.dtype)
    if count <= 2:
        return Want(value)
    if op == ReduceOp.PRODUCT:
        scale = total.abs()
    else:
        scale = sum((_parts(term) for term in wide), torch.zeros(())) / (count if op == ReduceOp.AVG else 1)
    roundings = count - 1 + (op == ReduceOp.AVG) + 1  # the last one is that of `value`
    info = torch.finfo(first.dtype)
    return Want(value, (roundings * info.eps / 2 * 1.01 * scale + info.tiny * info.eps).abs())


def _combined(op: ReduceOp.RedOpType, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if op in _EXACT:
        return _EXACT[op](a, b)
    return a * b if op == ReduceOp.PRODUCT else a + b


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128 if x.dtype.is_complex else torch.float64)


def _parts(x: torch.Tensor) -> torch.Tensor:
    """Return the magnitude that the rounding of complex numbers goes by: that of both parts."""
    return x.real.abs() + x.imag.abs() if x.is_complex() else x.abs()


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements, in their order."""
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)  # copying would make any byte 0 or 1
    # A single element counts as contiguous whatever its stride, so this copies.
    return x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def packed(exchange: Exchange, tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors, one after the other, in shared memory."""
    room = exchange.empty(sum(tensor.numel() for tensor in tensors), tensors[0].dtype)
    return torch.cat([tensor.flatten() for tensor in tensors], out=room)
