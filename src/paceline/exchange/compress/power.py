"""A matrix as a product of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.compress.codec import Codec, Slot, computed, needs


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
        product = torch.outer(left[:, 0], right[:, 0])
        for column in range(1, left.shape[1]):
            product += torch.outer(left[:, column], right[:, column])
        return product.view(-1)[offset : offset + count].to(dtype).view(tuple(shape))
