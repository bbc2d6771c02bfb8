"""Half as many bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from paceline.exchange.compress.codec import Codec, Slot, needs


class _Cast(Codec):
    """Another floating-point type."""

    dtype: ClassVar[torch.dtype]
    rows = True

    def encode(self, values: Tensor, slot: Slot | None = None) -> tuple[Tensor, ...]:
        """See `Codec`."""
        return (values.detach().to(self.dtype, copy=True),)

    def take_off(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """See `Codec`."""
        values.sub_(tensors[0])

    @classmethod
    def _decode(cls, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        needs(
            len(tensors) == 1 and tensors[0].shape == torch.Size(shape) and tensors[0].dtype == cls.dtype,
            cls,
            tensors,
            shape,
        )
        return tensors[0].to(dtype)


class BFloat16(_Cast):
    """16 bits with the range of float32."""

    number = 2
    name = "bfloat16"
    summary = "16 bits: the range of float32, 8 bits of precision"
    dtype = torch.bfloat16

    @staticmethod
    def decode(tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        return BFloat16._decode(tensors, shape, dtype)


class Float16(_Cast):
    """16 bits with a small range: what is finite and beyond it becomes the largest number."""

    number = 1
    name = "float16"
    summary = "16 bits: up to 65504, 11 bits of precision"
    dtype = torch.float16

    def encode(self, values: Tensor, slot: Slot | None = None) -> tuple[Tensor, ...]:
        """See `Codec`."""
        (cast,) = super().encode(values)
        beyond = cast.isinf()
        if beyond.any():
            beyond &= values.isfinite()
            most = torch.finfo(torch.float16).max
            cast[beyond] = values[beyond].sign().to(torch.float16) * most
        return (cast,)

    @staticmethod
    def decode(tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        return Float16._decode(tensors, shape, dtype)
