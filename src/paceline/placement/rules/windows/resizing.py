"""Resizing of images: batch and channels may be split, and places where each piece is resized as the whole is.

A result between pixels depends on few rows around its place, so neighbours exchange a halo, which is resized with the
rest and then cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import isclose
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import Shape, local_shape
from paceline.placement.rules.rule import Axes, AxisRule, Call, Localize, RuleFunction, Strategy, rule
from paceline.placement.rules.windows.halo import Halos, Windows, rerun, with_item
from paceline.placement.rules.words import labels_in, numbered
from paceline.placement.windows import Rows

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
_LEADING: Axes = ("n", "c")
_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}
"""The user's factors, by the number of places; kernels prefer them to the ratio of sizes."""


def _shapes(call: Call) -> tuple[Shape, Shape]:
    """The shapes before and after resizing, also where the call is its gradient."""
    tensors = call.inputs[0], call.outputs[0] or ()
    return tensors[::-1] if "grad_output" in call.arguments else tensors


def _sized(call: Call) -> Localize:
    before, after = _shapes(call)

    def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
        (given,), (made,) = strategy.inputs, strategy.outputs
        if "grad_output" not in arguments:
            return {"output_size": list(local_shape(after, made, parts)[2:])}
        return {
            "output_size": list(local_shape(after, given, parts)[2:]),
            "input_size": list(local_shape(before, made, parts)),
        }

    return localize


# To the nearest pixel.


def _repeats(size: int, out: int, scale: float | None, *, centred: bool) -> bool:
    """Whether kernels, which round, do to each piece what they do to the whole: in either precision."""
    if max(size, out) % max(min(size, out), 1):
        return False
    results = torch.arange(out)
    wanted = (2 * results + 1) * size // (2 * out) if centred else results * size // out
    for dtype in (torch.float32, torch.float64):
        ratio = torch.tensor(1 / scale if scale else size / out, dtype=dtype)
        found = ((results + (0.5 if centred else 0.0)).to(dtype) * ratio).floor()
        if not torch.equal(found.long(), wanted):
            return False
    return True


def _nearest(places: int) -> RuleFunction:
    def resize(call: Call) -> AxisRule:
        before, after = _shapes(call)
        sizes = zip(before[2:], after[2:], _SCALES[places], strict=True)
        centred = "exact" in str(call.target)
        axes: Axes = _LEADING + tuple(
            label if _repeats(size, out, call[scale], centred=centred) else None
            for label, (size, out, scale) in zip(numbered(places, "s"), sizes, strict=True)
        )
        return AxisRule((axes,), (axes,), labels_in([axes]), linear=((0,),), localize=_sized(call))

    return resize


# Between pixels.


class _Interpolation:
    """A resizing, seen along one of its places."""

    def __init__(self, call: Call, dim: int, places: int, reach: int) -> None:
        self._call = call
        self._dim = dim
        before, after = (shape[2 + dim] for shape in _shapes(call))
        ratio, scale = Fraction(before, after), call[_SCALES[places][dim]]
        # Whole steps of the pattern in which results lie between rows, so that the halo becomes whole results too.
        self._margin = -(-reach // ratio.numerator) * ratio.numerator
        self._cut = self._margin * ratio.denominator // ratio.numerator
        self._out = after
        self.windows = Windows(2 + dim, before, after, self._rows, "nearest")
        self.is_exact = (
            not call["align_corners"]
            and (not scale or isclose(scale * before, after, rel_tol=1e-12))
            and 2 * self._margin <= before
        )

    def _rows(self, parts: int) -> Rows:
        piece = self.windows.size // parts
        return Rows(-self._margin, piece, piece + 2 * self._margin)

    def forward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write the resizing."""
        x, share = self.windows.take(writer, named["self"]), self._out // writer.parts
        wide = rerun(writer, self._call, named, self=x, output_size=self._resized(named, writer.parts))
        if self._cut == 0:
            return [wide]
        return [writer.call(aten.slice.Tensor, wide, self.windows.dim, self._cut, self._cut + share)]

    def backward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write its gradient."""
        grad = named["grad_output"]
        if self._cut:
            around = [0, 0] * (len(named["output_size"]) - 1 - self._dim) + [self._cut, self._cut]
            grad = writer.call(aten.constant_pad_nd.default, grad, around)
        sizes = {
            "output_size": self._resized(named, writer.parts),
            "input_size": self.windows.resized(named["input_size"], writer.parts),
        }
        return [self.windows.add(writer, rerun(writer, self._call, named, grad_output=grad, **sizes))]

    def _resized(self, named: Mapping[str, Any], parts: int) -> list[int]:
        return with_item(named["output_size"], self._dim, self._out // parts + 2 * self._cut)


def _interpolation(places: int, order: int) -> RuleFunction:
    """`order` is 1 where results lie on lines, 3 where on cubic curves."""

    def resize(call: Call) -> AxisRule:
        axes: Axes = _LEADING + (None,) * places
        backward = "grad_output" in call.arguments
        halos, (before, after) = Halos(call), _shapes(call)
        for dim in range(places):
            shrinks = before[2 + dim] >= after[2 + dim]
            found = _Interpolation(call, dim, places, 2 if order == 3 else 0 if shrinks else 1)
            if found.is_exact:
                write = found.backward if backward else found.forward
                halos.offer(found.windows, list(call.arguments), write, moved=[before])
        return AxisRule(
            (axes,),
            (axes,),
            labels_in([axes]),
            linear=((0,),),
            localize=_sized(call),
            extra=halos.extra,
            written=halos.written,
        )

    return resize


def _smoothed(call: Call) -> AxisRule:
    """With antialiasing the weights of pixels at the edge differ: places stay whole."""
    axes: Axes = _LEADING + (None,) * (len(call.inputs[0]) - 2)
    return AxisRule((axes,), (axes,), labels_in([axes]), linear=((0,),), localize=_sized(call))


for _places in (1, 2, 3):
    for _name in (f"upsample_nearest{_places}d", f"_upsample_nearest_exact{_places}d"):
        for _target in (getattr(aten, _name).default, getattr(aten, f"{_name}_backward").default):
            rule(_target)(_nearest(_places))
for _name, _places, _order in (
    ("upsample_linear1d", 1, 1),
    ("upsample_bilinear2d", 2, 1),
    ("upsample_trilinear3d", 3, 1),
    ("upsample_bicubic2d", 2, 3),
):
    for _target in (getattr(aten, _name).default, getattr(aten, f"{_name}_backward").default):
        rule(_target)(_interpolation(_places, _order))
for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    rule(getattr(aten, _name).default, getattr(aten, f"{_name}_backward").default)(_smoothed)
