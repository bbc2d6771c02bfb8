"""Few bits for an element, and a scale for each block of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.exchange.compress.codec import Codec, Slot, computed, needs

_AT_ONCE: Final = 1 << 16
"""Elements that stay in the cache while several operations go over them; a multiple of all blocks."""


class Int8(Codec):
    """Whole numbers from -127 to 127, times the block's largest / 127 (as Dettmers, 2016, for linear quantization)."""

    number = 3
    name = "int8"
    summary = "8 bits, with a scale for each 128 elements"
    tensors = 2
    rows = True

    block: Final = 128

    def encode(self, values: Tensor, slot: Slot | None = None) -> tuple[Tensor, ...]:
        """Return [n] int8 and a scale for each block."""
        flat = computed(values)
        whole = torch.empty(len(flat), dtype=torch.int8)
        scales = torch.empty(_blocks(len(flat), self.block), dtype=torch.float32)
        for start in range(0, len(flat), _AT_ONCE):
            part = _in_blocks(flat[start : start + _AT_ONCE], self.block)
            scale = part.abs().amax(1).div_(127).float()
            at = start // self.block
            scales[at : at + len(scale)] = scale
            divisor = torch.where(scale > 0, scale, 1).to(part.dtype)[:, None]
            rounded = part.div(divisor).round_().clamp_(-127, 127).to(torch.int8).view(-1)
            whole[start : start + _AT_ONCE] = rounded[: len(flat) - start]
        return whole, scales

    @staticmethod
    def decode(tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        count = math.prod(shape)
        needs(_are(tensors, (torch.int8, count), (torch.float32, _blocks(count, Int8.block))), Int8, tensors, shape)
        values = torch.empty(count, dtype=dtype)
        whole, scales = tensors
        for start, part in Int8._parts(whole, scales):
            values[start : start + len(part)] = part
        return values.view(tuple(shape))

    def take_off(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """See `Codec`."""
        flat = values.view(-1)
        whole, scales = tensors
        for start, part in Int8._parts(whole, scales):
            flat[start : start + len(part)].sub_(part.to(values.dtype))

    @staticmethod
    def _parts(whole: Tensor, scales: Tensor) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, len(whole), _AT_ONCE):
            part = whole[start : start + _AT_ONCE]
            at = start // Int8.block
            scale = scales[at : at + _blocks(len(part), Int8.block), None]
            yield start, (_in_blocks(part, Int8.block) * scale).view(-1)[: len(part)]


class OneBit(Codec):
    """The sign, times the mean size of the block (Seide et al., 2014). Needs error feedback."""

    number = 4
    name = "one_bit"
    summary = "the sign, with a scale for each 1024 elements"
    tensors = 2

    block: Final = 1024

    def encode(self, values: Tensor, slot: Slot | None = None) -> tuple[Tensor, ...]:
        """Return [ceil(n / 8)] uint8 and a scale for each block."""
        flat = computed(values)
        signs = torch.from_numpy(np.packbits((flat >= 0).numpy()))
        scales = torch.empty(_blocks(len(flat), self.block), dtype=torch.float32)
        for start in range(0, len(flat), _AT_ONCE):
            part = flat[start : start + _AT_ONCE]
            at = start // self.block
            sums = _in_blocks(part, self.block).abs().sum(1)
            counts = torch.full_like(sums, self.block)
            counts[-1] = len(part) - self.block * (len(sums) - 1)
            scales[at : at + len(sums)] = sums / counts
        return signs, scales

    @staticmethod
    def decode(tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        count = math.prod(shape)
        kinds = (torch.uint8, -(-count // 8)), (torch.float32, _blocks(count, OneBit.block))
        needs(_are(tensors, *kinds), OneBit, tensors, shape)
        signs, scales = tensors
        values = torch.empty(count, dtype=dtype)
        for start, part in OneBit._parts(signs, scales, count):
            values[start : start + len(part)] = part
        return values.view(tuple(shape))

    def take_off(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """See `Codec`."""
        flat = values.view(-1)
        signs, scales = tensors
        for start, part in OneBit._parts(signs, scales, len(flat)):
            flat[start : start + len(part)].sub_(part.to(values.dtype))

    @staticmethod
    def _parts(signs: Tensor, scales: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, count, _AT_ONCE):
            size = min(_AT_ONCE, count - start)
            bits = np.unpackbits(signs[start // 8 : start // 8 + -(-size // 8)].numpy(), count=size)
            at = start // OneBit.block
            scale = scales[at : at + _blocks(size, OneBit.block), None]
            signed = _in_blocks(torch.from_numpy(bits).float().mul_(2).sub_(1), OneBit.block)
            yield start, signed.mul_(scale).view(-1)[:size]


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def _in_blocks(flat: Tensor, block: int) -> Tensor:
    """Return a flat tensor as [blocks, block], with zeros at its end."""
    lack = -len(flat) % block
    padded = torch.nn.functional.pad(flat, (0, lack)) if lack else flat
    return padded.view(-1, block)


def _are(tensors: Sequence[Tensor], *kinds: tuple[torch.dtype, int]) -> bool:
    return [(x.dtype, tuple(x.shape)) for x in tensors] == [(dtype, (count,)) for dtype, count in kinds]
