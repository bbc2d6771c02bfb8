"""What makes gradients smaller, and back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from paceline.errors import ExchangeError


@dataclass
class Slot:
    """What is known of a slice of a tensor, and what a codec keeps of it from one call to the next.

    Attributes:
        width: elements of a row of the matrix that the slice is cut from; 0: it is none.
        offset: elements of the slice's first row that came before it.
        kept: by name.
    """

    width: int = 0
    offset: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Tensor) -> Slot:
        """Return that of a whole tensor, of which nothing is kept."""
        return cls(math.prod(values.shape[1:]) if values.ndim > 1 else 0)


class Codec(ABC):
    """One way to do it.

    Attributes:
        number: what messages call it.
        name: what recipes call it.
        summary: one line for `--help` and docs.
        tensors: into how many it turns one.
        rows: whether it is for rows of sparse tables too.
    """

    number: ClassVar[int]
    name: ClassVar[str]
    summary: ClassVar[str]
    tensors: ClassVar[int] = 1
    rows: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def encode(self, values: Tensor, slot: Slot | None = None) -> tuple[Tensor, ...]:
        """Return what is sent for some values, of any shape; nothing of it shares their memory."""

    @staticmethod
    @abstractmethod
    def decode(tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return values of this shape and type. The same bits on every machine.

        Raises:
            ExchangeError: the tensors do not fit.
        """

    def take_off(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """Subtract from values, in place, what `encode` made of them."""
        values.sub_(self.decode(tensors, values.shape, values.dtype))


class Identity(Codec):
    """Values go as they are."""

    number = 0
    name = "none"
    summary = "values as they are"
    rows = True

    def encode(self, values: Tensor, slot: Slot | None = None) -> tuple[Tensor, ...]:
        """See `Codec`."""
        return (values.clone(),)

    @staticmethod
    def decode(tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        (values,) = tensors
        needs(values.shape == torch.Size(shape) and values.dtype == dtype, Identity, tensors, shape)
        return values


def needs(right: bool, codec: type[Codec], tensors: Sequence[Tensor], shape: Sequence[int]) -> None:
    """Check what was received.

    Raises:
        ExchangeError: it is not right.
    """
    if not right:
        given = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors) or "nothing"
        raise ExchangeError(f"what came as {codec.name} of {list(shape)} values does not fit: {given}.")


def computed(values: Tensor) -> Tensor:
    """Return values flat, in a type to compute in."""
    flat = values.detach().reshape(-1)
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
