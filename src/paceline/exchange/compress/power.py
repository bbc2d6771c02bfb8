"""A matrix as a product of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.compress.codec import Codec, Slot, computed, needs

_AT_ONCE: Final = 1 << 16
"""Elements of a product that are made at once."""


@dataclass(frozen=True)
class PowerSgd(Codec):
    """PowerSGD (Vogels, Karimireddy and Jaggi, 2019): a step of power iteration, from where the last one ended.

    What is no matrix, or not smaller as a product, goes as it is. Needs error feedback.
    """

    number = 7
    name = "power_sgd"
    summary = "a matrix as a product of two of a low rank"
    tensors = 3

    rank: int = 2

    def __post_init__(self) -> None:
        if self.rank < 1 or self.rank != int(self.rank):
            raise ExchangeError(f"power_sgd({self.rank}): the rank is a whole number from 1.")

    def __str__(self) -> str:
        return f"{self.name}({self.rank})"

    def encode(self, values: Tensor, slot: Slot | None = None) -> tuple[Tensor, ...]:
        """Return the left and right matrix ([m, rank], [width, rank]), and how many elements precede ours."""
        slot = slot or Slot.of(values)
        flat = computed(values)
        rows = -(-(slot.offset + len(flat)) // slot.width) if slot.width else 0
        if not rows or self.rank * (rows + slot.width) >= len(flat):
            return flat.clone(), flat.new_empty(0, 0), torch.zeros(1, dtype=torch.int64)
        lack = rows * slot.width - slot.offset - len(flat)
        padded = torch.nn.functional.pad(flat, (slot.offset, lack)) if slot.offset or lack else flat
        matrix = padded.view(rows, slot.width)
        right = slot.kept.get("right")
        left = torch.linalg.qr(matrix @ (self._start(matrix) if right is None else right)).Q
        right = matrix.T @ left
        if right.isfinite().all() and right.any(0).all():  # else there is nothing in it to go on from
            slot.kept["right"] = right
        return left.contiguous(), right.clone(), torch.tensor([slot.offset])

    def _start(self, matrix: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix.dtype)

    @staticmethod
    def decode(tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Codec`. A product of matrices is not the same bits on all machines, and so not used here."""
        count = math.prod(shape)
        needs(len(tensors) == 3 and tensors[2].shape == (1,), PowerSgd, tensors, shape)
        left, right, offset = tensors[0], tensors[1], int(tensors[2])
        if not right.numel():
            needs(left.shape == (count,), PowerSgd, tensors, shape)
            return left.to(dtype).view(tuple(shape))
        right_shape = left.ndim == right.ndim == 2 and left.shape[1] == right.shape[1] and left.dtype == right.dtype
        fits = right_shape and 0 <= offset < len(right) and 0 <= len(left) * len(right) - offset - count < len(right)
        needs(fits, PowerSgd, tensors, shape)
        values = torch.empty(count, dtype=dtype)
        for start, part in _parts(left, right, offset, count):
            values[start : start + len(part)] = part
        return values.view(tuple(shape))

    def take_off(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """See `Codec`."""
        left, right, offset = tensors
        flat = values.view(-1)
        if not right.numel():
            flat.sub_(left)
            return
        for start, part in _parts(left, right, int(offset), len(flat)):
            flat[start : start + len(part)].sub_(part.to(values.dtype))


def _parts(left: Tensor, right: Tensor, offset: int, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the elements of a product, from `offset` on: some rows at a time, that they stay in the cache."""
    columns = right.T.contiguous()
    rows = max(1, _AT_ONCE // len(right))
    for first in range(0, len(left), rows):
        some = left[first : first + rows]
        product = some[:, :1] * columns[0]
        term = torch.empty_like(product)
        for column in range(1, some.shape[1]):
            product += torch.mul(some[:, column : column + 1], columns[column], out=term)
        start = first * len(right) - offset
        yield max(0, start), product.view(-1)[max(0, -start) : count - start]
