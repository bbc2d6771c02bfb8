"""Pooling: batch, channels and places may be split.

Neighbours exchange a halo where windows overlap. Maxima come with their positions in the image, which stay those in the
whole image: a rank turns the ones in its window into them, and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import Shape, local_shape
from paceline.placement.rules.rule import Axes, AxisRule, Call, RuleFunction, Strategy, rule
from paceline.placement.rules.windows.halo import Halos, Windows, rerun, sliding, with_item
from paceline.placement.rules.words import labels_in, numbered, shape_of
from paceline.placement.windows import Rows

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten


def _each(values: Sequence[int], dim: int) -> int:
    return values[dim] if len(values) > 1 else values[0]


class _Positions:
    """Positions in an image, numbers in row-major order, where one of its dimensions is seen through windows.

    Args:
        sizes: of the image.
        dim: which dimension.
        windows: a rank's.
        dilation: from one element of a pooled window to the next.
    """

    def __init__(self, sizes: Shape, dim: int, windows: Windows, dilation: int = 1) -> None:
        self._inner = prod(sizes[dim + 1 :])
        self._whole = sizes[dim] * self._inner
        self._outermost = dim == 0
        self._windows = windows
        self._dilation = dilation

    def in_image(self, writer: Writer, positions: Node) -> Node:
        """Return the positions in the image of those in this rank's window."""
        span = self._windows.length(writer.parts) * self._inner
        inside = positions if self._outermost else writer.call(aten.remainder.Scalar, positions, span)
        found = writer.call(aten.add.Tensor, inside, self._start(writer))
        if self._windows.rows(writer.parts).first < 0:
            # Where a window sees nothing but the lowest number, its first element that is there counts as the maximum.
            first = writer.call(aten.remainder.Scalar, found, self._inner * self._dilation)
            found = writer.call(aten.where.self, writer.call(aten.lt.Scalar, found, 0), first, found)
        if self._outermost:
            return found
        outer = writer.call(aten.div.Scalar_mode, positions, span, rounding_mode="floor")
        return writer.call(aten.add.Tensor, found, writer.call(aten.mul.Scalar, outer, self._whole))

    def in_window(self, writer: Writer, positions: Node) -> Node:
        """The reverse."""
        found = writer.call(aten.sub.Tensor, positions, self._start(writer))
        if self._outermost:
            return found
        outer = writer.call(aten.div.Scalar_mode, positions, self._whole, rounding_mode="floor")
        span = self._windows.length(writer.parts) * self._inner
        return writer.call(aten.sub.Tensor, found, writer.call(aten.mul.Scalar, outer, self._whole - span))

    def _start(self, writer: Writer) -> Node:
        """The position in the image of the first element of the window."""
        rows = self._windows.rows(writer.parts)
        here = writer.call(aten.mul.Scalar, writer.coordinate(), rows.step * self._inner)
        return writer.call(aten.add.Scalar, here, rows.first * self._inner)


class _Pool:
    """A pooling, seen along one of its places."""

    linear: tuple[tuple[int, ...], ...] = ((0,),)
    edge: str | int = 0

    def __init__(self, call: Call, dim: int, places: int, before: Shape, after: Shape) -> None:
        self._call = call
        self._dim = dim
        self._places = places
        self._sizes = before[len(before) - places :]
        at = len(before) - places + dim
        size, out = before[at], after[at]
        kernel, stride = call["kernel_size"], call["stride"] or call["kernel_size"]
        self._dilation = _each(call["dilation"], dim) if "dilation" in call.arguments else 1
        extent = self._dilation * (_each(kernel, dim) - 1) + 1
        self._padding, step = _each(call["padding"], dim), _each(stride, dim)
        self._beyond = (
            (out - 1) * step + extent - size - 2 * self._padding
        )  # with `ceil_mode` the last may reach further
        self.windows = Windows(at, size, out, sliding(out, step, self._padding, extent), self.edge)

    @property
    def is_exact(self) -> bool:
        """Whether a rank gets the same from its windows as from the whole."""
        return True

    def forward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write the pooling."""
        return [self._run(writer, named, self.windows.take(writer, named["self"]))]

    def backward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write its gradient, which depends on the shape of the input only."""
        grad = self._run(writer, named, self.windows.like(writer, named["self"]))
        return [self.windows.add(writer, grad)]

    def _run(self, writer: Writer, named: Mapping[str, Any], x: Node) -> Node:
        padding = [_each(self._call["padding"], dim) for dim in range(self._places)]
        return rerun(writer, self._call, named, self=x, padding=with_item(padding, self._dim, 0))


class _Average(_Pool):
    @property
    def is_exact(self) -> bool:
        """Whether each sum is divided by the same number, that of the elements of a window."""
        if self._call["divisor_override"] is not None:
            return True
        return self._beyond <= 0 and (self._padding == 0 or bool(self._call["count_include_pad"]))


class _Maximum(_Pool):
    linear = ()
    edge = "lowest"

    def forward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write the pooling, with positions in the whole image."""
        both = self._run(writer, named, self.windows.take(writer, named["self"]))
        return [writer.item(both, 0), self._positions.in_image(writer, writer.item(both, 1))]

    def backward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write its gradient."""
        indices = self._positions.in_window(writer, named["indices"])
        return super().backward(writer, {**named, "indices": indices}, strategy)

    @property
    def _positions(self) -> _Positions:
        return _Positions(self._sizes, self._dim, self.windows, self._dilation)


class _AdaptiveMaximum(_Maximum):
    """Windows begin and end where a place is cut, if sizes before and after divide."""

    def __init__(self, call: Call, dim: int, places: int, before: Shape, after: Shape) -> None:
        self._call = call
        self._dim = dim
        self._sizes = before[len(before) - places :]
        self._dilation = 1
        at = len(before) - places + dim
        size, self._out = before[at], after[at]
        self.windows = Windows(at, size, self._out, lambda parts: Rows(0, size // parts, size // parts))

    def _run(self, writer: Writer, named: Mapping[str, Any], x: Node) -> Node:
        if "output_size" not in named:
            return rerun(writer, self._call, named, self=x)
        share = with_item(named["output_size"], self._dim, self._out // writer.parts)
        return rerun(writer, self._call, named, self=x, output_size=share)


def _leading(shape: Shape, places: int) -> Axes:
    """Axes of batch and channels, or of channels alone; those of places are not named."""
    return numbered(len(shape) - places) + (None,) * places


def _pooling(kind: type[_Pool], places: int) -> RuleFunction:
    def pooling(call: Call) -> AxisRule:
        backward = "grad_output" in call.arguments
        before = shape_of(call, "self")
        after = shape_of(call, "grad_output") if backward else call.outputs[0] or ()
        axes, halos = _leading(before, places), Halos(call)
        for dim in range(places):
            pool = kind(call, dim, places, before, after)
            if pool.is_exact:
                write = pool.backward if backward else pool.forward
                halos.offer(pool.windows, list(call.arguments), write, moved=[before])
        return AxisRule(
            (axes,) * len(call.inputs),
            (axes,) * len(call.outputs),
            labels_in([axes]),
            linear=kind.linear,
            extra=halos.extra,
            written=halos.written,
        )

    return pooling


rule(aten.avg_pool2d.default, aten.avg_pool2d_backward.default)(_pooling(_Average, 2))
rule(aten.avg_pool3d.default, aten.avg_pool3d_backward.default)(_pooling(_Average, 3))
rule(aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default)(_pooling(_Maximum, 2))
rule(aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default)(_pooling(_Maximum, 3))
rule(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool2d_backward.default)(_pooling(_AdaptiveMaximum, 2))


def _adaptive_average(places: int) -> RuleFunction:
    def pooling(call: Call) -> AxisRule:
        """Windows begin and end where places are cut, as far as sizes before and after divide."""
        leading = len(call.inputs[0]) - places
        axes: Axes = numbered(leading) + numbered(places, "s")

        def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
            if "output_size" not in arguments:
                return {}
            return {"output_size": list(local_shape(call.outputs[0] or (), strategy.outputs[0], parts)[leading:])}

        return AxisRule((axes,) * len(call.inputs), (axes,), labels_in([axes]), linear=((0,),), localize=localize)

    return pooling


rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default)(_adaptive_average(2))
rule(aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d_backward.default)(_adaptive_average(3))
