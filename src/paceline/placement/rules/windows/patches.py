"""Patches of images: as channels, and as columns of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import Shape, Shard
from paceline.placement.rules.rule import Axes, AxisRule, Call, Factors, Strategy, rule
from paceline.placement.rules.windows.halo import Halos, Windows, rerun, sliding, with_item
from paceline.placement.rules.words import labels_in, numbered, output_of

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten


@rule(aten.pixel_shuffle.default)
def _shuffle(call: Call) -> AxisRule:
    factor = call["upscale_factor"]
    packed, spread = _packed(output_of(call), factor)
    return AxisRule((packed,), (spread,), labels_in([packed]), linear=((0,),))


@rule(aten.pixel_unshuffle.default)
def _unshuffle(call: Call) -> AxisRule:
    factor = call["downscale_factor"]
    packed, spread = _packed(call.inputs[0], factor)
    return AxisRule((spread,), (packed,), labels_in([packed]), linear=((0,),))


def _packed(shape: Shape, factor: int) -> tuple[Axes, Axes]:
    """Axes of an image of `shape` whose patches are channels, and of the image itself."""
    *lead, channels, height, width = shape
    leading = numbered(len(lead))
    packed: Axes = (*leading, Factors((("c", channels), (None, factor * factor))), "h", "w")
    rows, columns = (Factors(((label, n // factor), (None, factor))) for label, n in (("h", height), ("w", width)))
    return packed, (*leading, "c", rows, columns)


class _Columns:
    """Patches of an image [N, C, H, W] as columns [N, C * patch, rows * columns], seen along one of its places."""

    def __init__(self, call: Call, dim: int, image: Shape) -> None:
        self._call = call
        self._dim = dim
        at = len(image) - 2
        counts = [self._count(image[at + place], place) for place in (0, 1)]
        size, out = image[at + dim], counts[dim]
        rows = sliding(out, call["stride"][dim], call["padding"][dim], self._extent(dim))
        self.windows = Windows(at + dim, size, out, rows)
        self.columns = Shard(at) if dim == 0 else Shard(at, counts[0])
        # Ranks that divide the columns have to divide the patches along this place, too.
        self.is_exact = dim == 1 or gcd(size, counts[0] * counts[1]) == gcd(size, out)

    def _extent(self, place: int) -> int:
        return int(self._call["dilation"][place] * (self._call["kernel_size"][place] - 1) + 1)

    def _count(self, size: int, place: int) -> int:
        call = self._call
        return int((size + 2 * call["padding"][place] - self._extent(place)) // call["stride"][place] + 1)

    def forward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write the cutting out."""
        x, padding = self.windows.take(writer, named["self"]), with_item(named["padding"], self._dim, 0)
        return [rerun(writer, self._call, named, self=x, padding=padding)]

    def backward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write the putting together, which adds up what overlaps."""
        sizes = with_item(named["output_size"], self._dim, self.windows.length(writer.parts))
        padding = with_item(named["padding"], self._dim, 0)
        return [self.windows.add(writer, rerun(writer, self._call, named, output_size=sizes, padding=padding))]


@rule(aten.im2col.default)
def _cut_out(call: Call) -> AxisRule:
    image, columns = _columns_axes(call, call.inputs[0])
    halos = Halos(call)
    for dim in (0, 1):
        along = _Columns(call, dim, call.inputs[0])
        if along.is_exact:
            halos.offer(along.windows, ["self"], along.forward, moved=[call.inputs[0]], outputs=[along.columns])
    return AxisRule((image,), (columns,), labels_in([image]), linear=((0,),), extra=halos.extra, written=halos.written)


@rule(aten.col2im.default)
def _put_together(call: Call) -> AxisRule:
    shape = output_of(call)
    image, columns = _columns_axes(call, shape)
    halos = Halos(call)
    for dim in (0, 1):
        along = _Columns(call, dim, shape)
        if along.is_exact:
            halos.offer(along.windows, ["self"], along.backward, moved=[shape], given=along.columns)
    return AxisRule((columns,), (image,), labels_in([image]), linear=((0,),), extra=halos.extra, written=halos.written)


def _columns_axes(call: Call, image: Shape) -> tuple[Axes, Axes]:
    """Axes of an image and of its patches as columns."""
    *lead, channels, _, _ = image
    leading, (height, width) = numbered(len(lead)), call["kernel_size"]
    return (*leading, "c", None, None), (*leading, Factors((("c", channels), (None, height * width))), None)
