"""The largest elements, and where they are. Needs error feedback: the others come later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.compress.codec import Codec, Slot, needs

_LEAST_SAMPLE: Final = 4096
_SAMPLED: Final = 0.01
_TOO_MANY: Final = 2.0


@dataclass(frozen=True)
class TopK(Codec):
    """A fraction of all elements (Aji and Heafield, 2017)."""

    number = 5
    name = "top_k"
    summary = "the largest elements: a fraction of all"
    tensors = 2

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ExchangeError(f"{self.name}({self.fraction}): the fraction is above 0 and at most 1.")

    def __str__(self) -> str:
        return f"{self.name}({self.fraction:g})"

    def encode(self, values: Tensor, slot: Slot | None = None) -> tuple[Tensor, ...]:
        """Return where they are, rising ([k] int32), and what they are ([k])."""
        flat = values.detach().reshape(-1)
        if flat.numel() >= 2**31:
            raise ExchangeError(f"{self.name} is for less than 2^31 elements at a time, and these are {flat.numel()}.")
        places = self._places(flat.abs().float())
        return places.to(torch.int32), flat[places]

    def _places(self, sizes: Tensor) -> Tensor:
        return _largest(sizes, self._count(len(sizes)))

    def _count(self, count: int) -> int:
        return min(count, max(1, math.ceil(self.fraction * count)))

    @staticmethod
    def decode(tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        count = math.prod(shape)
        right = len(tensors) == 2 and tensors[0].dtype == torch.int32 and tensors[1].dtype.is_floating_point
        right = right and tensors[0].ndim == 1 and tensors[0].shape == tensors[1].shape
        needs(right, TopK, tensors, shape)
        places, held = tensors[0].long(), tensors[1]
        rising = bool((places[1:] > places[:-1]).all())
        needs(not len(places) or (rising and int(places[0]) >= 0 and int(places[-1]) < count), TopK, tensors, shape)
        values = torch.zeros(count, dtype=dtype)
        values[places] = held.to(dtype)
        return values.view(tuple(shape))

    def take_off(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """See `Codec`."""
        values.view(-1)[tensors[0].long()] = 0


@dataclass(frozen=True)
class SampledTopK(TopK):
    """About a fraction of all elements: those beyond a size that a sample has (Lin et al., 2018)."""

    number = 6
    name = "sampled_top_k"
    summary = "about the largest elements, by a threshold from a sample"

    def _places(self, sizes: Tensor) -> Tensor:
        wanted = self._count(len(sizes))
        sampled = max(_LEAST_SAMPLE, math.ceil(_SAMPLED * len(sizes)), math.ceil(16 / self.fraction))
        if sampled * 2 > len(sizes):
            return _largest(sizes, wanted)
        step = len(sizes) // sampled | 1  # odd: rows of a matrix are often an even number of elements
        sample = sizes[::step]
        least = torch.topk(sample, self._count(len(sample)), sorted=True).values[-1]
        places = torch.nonzero(sizes >= least if least > 0 else sizes > 0).view(-1)
        if len(places) > _TOO_MANY * wanted:
            places = places[_largest(sizes[places], wanted)]
        return places


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Return where the largest are, in rising order."""
    if count == len(sizes):
        return torch.arange(count)
    places = np.argpartition(sizes.numpy(), len(sizes) - count)[len(sizes) - count :]
    places.sort()
    return torch.from_numpy(places)
