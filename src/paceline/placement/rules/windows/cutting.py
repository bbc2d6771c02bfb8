"""Cutting along a dimension: slices, pieces, overlapping windows of it.

A cut that meets the borders of blocks carries a split of these blocks, and costs nothing. What does not, such as the
middle of an image, moves rows between neighbours; a strided slice whose steps divide each piece does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import Placement, Shape, Shard, merged
from paceline.placement.rules.rule import AxisRule, Call, MapRule, Rule, Strategy, rule
from paceline.placement.rules.windows.halo import Halos, Windows, rerun, sliding
from paceline.placement.rules.words import all_but, labels_in, output_of, sized, uncut

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
_MOST_BLOCKS = 8
_SMALL_BLOCK = 8
"""A cut that meets the borders of blocks only if there are more, and they are smaller, is not one of a projection."""


@dataclass(frozen=True)
class _Interval:
    """The elements [start, stop) of a dimension of some size, or each `step`-th of them."""

    dim: int
    size: int
    start: int
    stop: int
    step: int

    @classmethod
    def of(cls, call: Call, shape: Shape) -> _Interval:
        """Read the arguments of a slice of a tensor of `shape`."""
        dim = call["dim"] % len(shape)
        size = shape[dim]
        start, stop = call["start"] or 0, size if call["end"] is None else call["end"]
        start, stop = (min(max(bound + size if bound < 0 else bound, 0), size) for bound in (start, stop))
        return cls(dim, size, start, max(start, stop), call["step"])

    @property
    def part(self) -> int:
        """How many elements there are."""
        return len(range(self.start, self.stop, self.step))

    @property
    def is_everywhere(self) -> bool:
        """Whether it has one element of each `step`, to the end: the same of each piece."""
        return self.size % self.step == 0 and self.part == self.size // self.step

    def is_free(self, rank: int) -> bool:
        """Whether splits of the dimension are to be carried as they are, or not at all; other cuts move rows."""
        if self.step > 1:
            return self.is_everywhere or not self.windows.divides
        block = gcd(self.start, self.stop, self.size)
        crosses = block == 1 or (block < _SMALL_BLOCK and self.size > block * _MOST_BLOCKS)
        # Tables are cut too, at the length of a batch; they are parameters, and whole.
        return self.part == self.size or not crosses or not self.windows.divides or rank < 3

    @property
    def windows(self) -> Windows:
        """What each element comes from."""
        return Windows(self.dim, self.size, self.part, sliding(self.part, self.step, -self.start, 1))

    def carry(self, placement: Placement, parts: int) -> Placement | None:
        """Return the placement of the part, where that of the whole can be carried."""
        if not isinstance(placement, Shard) or placement.dim != self.dim or self.step == 1:
            return _cut(self.dim, self.start, self.part, self.size, placement)
        if not self.is_everywhere:
            return None
        sizes = placement.sizes(self.size)
        if any(size % (self.step * parts) for size in sizes):
            return None
        return merged(self.dim, tuple(size // self.step for size in sizes))

    def carry_back(self, placement: Placement, parts: int) -> Placement | None:
        """Return the placement of the whole, from that of the part."""
        if not isinstance(placement, Shard) or placement.dim != self.dim or self.step == 1:
            return _widened(self.dim, self.start, self.part, self.size, placement)
        if not self.is_everywhere:
            return None
        return merged(self.dim, tuple(n * self.step for n in placement.sizes(self.part)))

    def localized(self, placement: Placement, parts: int) -> dict[str, Any]:
        """Return the arguments of the slice of a piece."""
        if not isinstance(placement, Shard) or placement.dim != self.dim:
            return {}
        if self.step > 1:
            return {"start": self.start, "end": self.size // parts}
        return {"start": self.start // parts, "end": self.stop // parts}


def _cut(dim: int, start: int, part: int, size: int, placement: Placement) -> Placement | None:
    """Placement of the elements [start, start + part) of a dimension of `size`: those of whole blocks of it."""
    if not isinstance(placement, Shard) or placement.dim != dim or part == size:
        return placement
    kept, begin = [], 0
    for block in placement.sizes(size):
        if start < begin + block and begin < start + part:
            kept.append(block)
            if begin < start or begin + block > start + part:
                return None
        begin += block
    return merged(dim, tuple(kept)) if kept else None


def _widened(dim: int, start: int, part: int, size: int, placement: Placement) -> Placement | None:
    """The reverse: blocks before and behind are as large as those of the part, or one each if that does not divide."""
    if not isinstance(placement, Shard) or placement.dim != dim or part == size:
        return placement
    if part == 0:
        return None
    blocks, rest = placement.sizes(part), size - start - part
    block = blocks[0]
    if len(set(blocks)) == 1 and start % block == 0 and rest % block == 0:
        return Shard(dim, size // block)
    return merged(dim, tuple(n for n in (start, *blocks, rest) if n))


def _localized_interval(dim: int, start: int, end: int, placement: Placement, parts: int) -> dict[str, Any]:
    split = isinstance(placement, Shard) and placement.dim == dim
    return {"start": start // parts, "end": end // parts} if split else {}


@rule(aten.slice.Tensor)
def _slice(call: Call) -> Rule:
    interval, rank = _Interval.of(call, call.inputs[0]), len(call.inputs[0])
    if interval.is_free(rank):
        return MapRule(
            interval.carry,
            interval.carry_back,
            lambda arguments, strategy, parts: interval.localized(strategy.inputs[0], parts),
        )
    windows = interval.windows

    def write(writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        x, length = windows.take(writer, named["self"]), windows.length(writer.parts)
        return [x if interval.step == 1 else rerun(writer, call, named, self=x, start=0, end=length)]

    halos, axes = Halos(call), all_but(rank, (interval.dim,))
    halos.offer(windows, ["self"], write, moved=[call.inputs[0]])
    return AxisRule((axes,), (axes,), labels_in([axes]), linear=((0,),), extra=halos.extra, written=halos.written)


@rule(aten.slice_backward.default)
def _slice_backward(call: Call) -> Rule:
    shape = output_of(call)
    interval, resize = _Interval.of(call, shape), sized("input_sizes", shape)
    if interval.is_free(len(shape)):

        def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
            return resize(arguments, strategy, parts) | interval.localized(strategy.inputs[0], parts)

        return MapRule(interval.carry_back, interval.carry, localize)
    windows = interval.windows

    def write(writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        x, length = named["grad_output"], windows.length(writer.parts)
        if interval.step > 1:
            sizes = windows.resized(named["input_sizes"], writer.parts)
            x = rerun(writer, call, named, input_sizes=sizes, start=0, end=length)
        return [windows.add(writer, x)]

    halos, axes = Halos(call), all_but(len(shape), (interval.dim,))
    halos.offer(windows, ["grad_output"], write, moved=[shape])
    return AxisRule(
        (axes,),
        (axes,),
        labels_in([axes]),
        linear=((0,),),
        localize=resize,
        extra=halos.extra,
        written=halos.written,
    )


@rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(call: Call) -> MapRule:
    """Pieces of a dimension. A split of each of them is a split of the whole in blocks."""
    shape = call.inputs[0]
    dim = call["dim"] % len(shape)
    sizes = [(out or ())[dim] for out in call.outputs]
    name = "split_size" if "split_size" in call.arguments else "split_sizes"

    def forward(placement: Placement, parts: int) -> Placement | None:
        if not isinstance(placement, Shard) or placement.dim != dim:
            return placement
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        pieces = {_cut(dim, start, size, shape[dim], placement) for start, size in zip(starts, sizes, strict=True)}
        return pieces.pop() if len(pieces) == 1 else None

    def backward(placement: Placement, parts: int) -> Placement | None:
        if not isinstance(placement, Shard) or placement.dim != dim:
            return placement
        if not isinstance(placement.blocks, int) or any(size % placement.blocks for size in sizes):
            return None
        return merged(dim, tuple(size // placement.blocks for size in sizes for _ in range(placement.blocks)))

    def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
        placement, given = strategy.inputs[0], arguments[name]
        if not isinstance(placement, Shard) or placement.dim != dim:
            return {}
        return {name: given // parts if isinstance(given, int) else [size // parts for size in given]}

    return MapRule(forward, backward, localize)


@rule(aten.unfold.default)
def _unfold(call: Call) -> Rule:
    shape = call.inputs[0]
    dim = call["dimension"] % len(shape)
    windows = _overlapping(dim, shape[dim], call)
    if not windows.divides:
        return uncut(dim)

    def write(writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        return [rerun(writer, call, named, self=windows.take(writer, named["self"]))]

    halos, axes = Halos(call), all_but(len(shape), (dim,))
    halos.offer(windows, ["self"], write, moved=[shape])
    return AxisRule(
        (axes,), ((*axes, None),), labels_in([axes]), linear=((0,),), extra=halos.extra, written=halos.written
    )


@rule(aten.unfold_backward.default)
def _unfold_backward(call: Call) -> Rule:
    shape = output_of(call)
    dim, resize = call["dim"] % len(shape), sized("input_sizes", shape)
    windows = _overlapping(dim, shape[dim], call)
    if not windows.divides:
        kept = uncut(dim)
        return MapRule(kept.forward, kept.backward, resize)

    def write(writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        sizes = windows.resized(named["input_sizes"], writer.parts)
        return [windows.add(writer, rerun(writer, call, named, input_sizes=sizes))]

    halos, axes = Halos(call), all_but(len(shape), (dim,))
    halos.offer(windows, ["grad_in"], write, moved=[shape])
    return AxisRule(
        ((*axes, None),),
        (axes,),
        labels_in([axes]),
        linear=((0,),),
        localize=resize,
        extra=halos.extra,
        written=halos.written,
    )


def _overlapping(dim: int, size: int, call: Call) -> Windows:
    """The windows that an unfolding gives a dimension of their own."""
    out = (size - call["size"]) // call["step"] + 1
    return Windows(dim, size, out, sliding(out, call["step"], 0, call["size"]))
