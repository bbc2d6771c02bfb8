"""What tensors are sent as between stages: as they are, or rounded to fewer bytes.

Rounded sends are no longer equal to serial; a plan asks for them by name, and reports say so. Integers, booleans,
single numbers and what is narrow already always travel as they are.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

import torch
from torch import Tensor

from paceline.runtime.pipeline.step import Sent

_BLOCK = 256


class Wire(Protocol):
    """How a tensor becomes the tensors that travel, and what it becomes again."""

    def layout(self, sent: Sent) -> list[Sent]:
        """Return what travels for a tensor like `sent`."""
        ...

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return contiguous tensors as `layout` tells them."""
        ...

    def decode(self, parts: list[Tensor], sent: Sent) -> Tensor:
        """Return the tensor that `encode` was given, as near as it can be."""
        ...


class Exact:
    """Nothing is rounded."""

    def layout(self, sent: Sent) -> list[Sent]:
        """Return the tensor itself."""
        return [sent]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the tensor, contiguous: receivers know shapes and no strides."""
        return [x.contiguous()]

    def decode(self, parts: list[Tensor], sent: Sent) -> Tensor:
        """Return the tensor."""
        return parts[0]


class BFloat16:
    """Floating-point tensors are rounded to bfloat16: half the bytes of float32."""

    def layout(self, sent: Sent) -> list[Sent]:
        """Return the tensor in its type on the wire."""
        return [Sent(sent.shape, torch.bfloat16 if _is_wide(sent) else sent.dtype)]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Round to nearest."""
        return [x.to(torch.bfloat16 if _is_wide(x) else x.dtype).contiguous()]

    def decode(self, parts: list[Tensor], sent: Sent) -> Tensor:
        """Widen again."""
        return parts[0].to(sent.dtype)


class Int8Blocks:
    """Floating-point tensors are rounded to int8, with a float32 scale for each block of 256: a quarter of float32."""

    def layout(self, sent: Sent) -> list[Sent]:
        """Return the integers and their scales."""
        if not _is_wide(sent):
            return [sent]
        blocks = -(-prod(sent.shape) // _BLOCK)
        return [Sent((blocks, _BLOCK), torch.int8), Sent((blocks, 1), torch.float32)]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Scale each block so that its largest magnitude is 127."""
        if not _is_wide(x):
            return [x.contiguous()]
        flat = x.reshape(-1).float()
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
        scale = blocks.abs().amax(1, keepdim=True) / 127
        rounded = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_()
        return [rounded.to(torch.int8), scale]

    def decode(self, parts: list[Tensor], sent: Sent) -> Tensor:
        """Multiply by the scales; a scale that is not finite makes its block so too, as it was."""
        if len(parts) == 1:
            return parts[0]
        values, scale = parts
        return (values * scale).view(-1)[: prod(sent.shape)].view(sent.shape).to(sent.dtype)


def wire_named(name: str) -> Wire:
    """Return the wire of a plan."""
    kinds: dict[str, type[Exact] | type[BFloat16] | type[Int8Blocks]] = {
        "exact": Exact,
        "bfloat16": BFloat16,
        "int8": Int8Blocks,
    }
    return kinds[name]()


def _is_wide(x: Sent | Tensor) -> bool:
    return x.dtype.is_floating_point and x.dtype.itemsize > 2 and prod(x.shape) > 1
