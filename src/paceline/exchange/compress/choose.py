"""Which codec serves a link: what is measured of codecs on this machine, against the measured speed of the link."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from paceline.exchange.compress.blocks import Int8
from paceline.exchange.compress.casts import BFloat16
from paceline.exchange.compress.codec import Codec, Identity, Slot
from paceline.exchange.compress.power import PowerSgd
from paceline.exchange.compress.top import SampledTopK

CANDIDATES: Final[tuple[Codec, ...]] = (Identity(), BFloat16(), Int8(), PowerSgd(4), SampledTopK(0.01))
"""From the one that changes gradients least to the one that changes them most."""

_MEASURED: Final = 1 << 20
"""Elements that are measured; larger tensors take as much longer."""
_TURNS: Final = 3
_WORTH: Final = 0.9
"""A codec that changes more must take less than this part of the time."""


@dataclass(frozen=True)
class Weighed:
    """A codec, and what a push of all tensors takes with it.

    Attributes:
        ratio: how many times fewer bytes.
        codec_s: seconds of encoding, error feedback and decoding.
        link_s: seconds on the link.
    """

    codec: Codec
    ratio: float
    codec_s: float
    link_s: float

    @property
    def total_s(self) -> float:
        """Seconds from a gradient here to a gradient there."""
        return self.codec_s + self.link_s

    def __str__(self) -> str:
        return (
            f"{self.codec}: {self.ratio:.1f} times fewer bytes, {self.codec_s:.4f} s + {self.link_s:.4f} s on the link"
        )


def weigh(
    link_bytes_per_s: float, shapes: Sequence[Sequence[int]], codecs: Sequence[Codec] = CANDIDATES
) -> list[Weighed]:
    """Return what a push of float32 tensors of these shapes takes, by codec."""
    total_bytes = sum(math.prod(shape) for shape in shapes) * torch.float32.itemsize
    samples = [(_sample(shape), count * _part(shape)) for shape, count in Counter(map(tuple, shapes)).items()]
    weighed = []
    for codec in codecs:
        made_bytes, seconds = 0.0, 0.0
        for sample, count in samples:
            size, took = _measured(codec, sample)
            made_bytes += size * count
            seconds += took * count
        ratio = total_bytes / made_bytes if made_bytes else 1.0
        weighed.append(Weighed(codec, ratio, seconds, made_bytes / link_bytes_per_s))
    return weighed


def choose(link_bytes_per_s: float, shapes: Sequence[Sequence[int]], codecs: Sequence[Codec] = CANDIDATES) -> Codec:
    """Return the codec for a link.

    That is the first for which none that changes gradients more is quicker by a tenth.

    Args:
        link_bytes_per_s: measured speed of the link.
        shapes: of the tensors that are pushed.
        codecs: from which to choose, the mildest first.
    """
    return chosen(weigh(link_bytes_per_s, shapes, codecs)).codec


def chosen(weighed: Sequence[Weighed]) -> Weighed:
    """Return the first that none after it beats by a tenth."""
    best = weighed[0]
    for other in weighed[1:]:
        if other.total_s < _WORTH * best.total_s:
            best = other
    return best


def _part(shape: tuple[int, ...]) -> float:
    """Return how many times longer a tensor is than its sample."""
    count = math.prod(shape)
    return count / _sampled(shape) if count else 0.0


def _sampled(shape: tuple[int, ...]) -> int:
    """Return the number of elements that are measured: whole rows."""
    width = math.prod(shape[1:])
    rows = max(1, min(_MEASURED // max(1, width), math.prod(shape[:1])))
    return rows * width


def _sample(shape: tuple[int, ...]) -> Tensor:
    width = math.prod(shape[1:])
    count = _sampled(shape)
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(0))
    return numbers.view(-1, width) if len(shape) > 1 and width else numbers


def _measured(codec: Codec, sample: Tensor) -> tuple[int, float]:
    """Return the bytes made of a sample, and the seconds of the quickest turn."""
    if isinstance(codec, Identity):
        return sample.nbytes, 0.0
    slot, seconds, size = Slot.of(sample), math.inf, 0
    for _ in range(_TURNS):
        left = sample.clone()
        start = time.perf_counter()
        made = codec.encode(left, slot)
        codec.take_off(left, made)
        codec.decode(made, left.shape, left.dtype)
        seconds = min(seconds, time.perf_counter() - start)
        size = sum(x.nbytes for x in made)
    return size, seconds
