"""Group norm: samples, groups and places may be split.

Where places are, each rank adds up what it has of every group, and statistics are those of all: two numbers per group
and sample are summed over ranks, forwards and backwards. It is batch norm on another view, so its parts are those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import PARTIAL, REPLICATE, Placement
from paceline.placement.rules.rule import Axes, AxisRule, Call, Factors, Label, Move, Strategy, Write, Written, rule
from paceline.placement.rules.words import named, numbered, shape_of
from paceline.program import operators  # noqa: F401  (registers torch.ops.paceline)

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
ours = torch.ops.paceline


def _places(call: Call) -> Axes:
    return numbered(len(shape_of(call, "input")) - 2, "s")


def _axes(call: Call) -> dict[str, Axes]:
    """Channels are (group, member); groups may be split, whole."""
    groups, channels = call["group"], call["C"]
    channel = Factors((("g", groups), (None, channels // groups)))
    return {
        "input": ("n", channel, *_places(call)),
        "grad_out": ("n", channel, *_places(call)),
        "mean": ("n", "g"),
        "rstd": ("n", "g"),
        "weight": (channel,),
        "bias": (channel,),
    }


def _localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
    match strategy.label:
        case "n":
            return {"N": arguments["N"] // parts}
        case "g":
            return {"C": arguments["C"] // parts, "group": arguments["group"] // parts}
    return {}


def _rule(
    call: Call, outputs: tuple[Axes, ...], results: Mapping[tuple[Label, int], Placement], write: Write, *, sums: bool
) -> AxisRule:
    axes, places = _axes(call), [label for label in _places(call) if label is not None]
    statistics = Move(2 * call["N"] * call["group"] * torch.float64.itemsize, PARTIAL, REPLICATE)
    written = Written(write, (statistics,) if sums else ())
    return AxisRule(
        named(call, axes),
        outputs,
        frozenset({"n", "g", *places}),
        results=results,
        localize=_localize,
        written=dict.fromkeys(places, written),
    )


@rule(aten.native_group_norm.default)
def _group_norm(call: Call) -> AxisRule:
    axes = _axes(call)
    outputs = (axes["input"], axes["mean"], axes["rstd"])
    known: dict[tuple[Label, int], Placement] = {(label, i): REPLICATE for label in _places(call) for i in (1, 2)}

    def write(writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        x, view = named["input"], _View(writer, named)
        rows = writer.call(aten.reshape.default, x, [1, view.groups, -1])
        shift = writer.call(aten.new_zeros.default, x, [view.groups], dtype=call.output_dtypes[1])
        sums = writer.call(ours.batch_norm_sums.default, rows, shift)
        sums = writer.redistribute(sums, PARTIAL, REPLICATE)
        count = named["C"] // named["group"] * named["HxW"]
        statistics = writer.call(ours.batch_norm_statistics.default, sums, shift, count, named["eps"])
        mean, rstd = writer.item(statistics, 0), writer.item(statistics, 2)
        weight, bias = (view.of_each_sample(named[name]) for name in ("weight", "bias"))
        each = view.of_each_channel(mean), view.of_each_channel(rstd)
        y = writer.call(ours.batch_norm_apply.default, view.channels(x), *each, weight, bias)
        y = writer.call(aten.reshape.default, y, list(x.meta["val"].shape))
        shape = [named["N"], named["group"]]
        return [y, *(writer.call(aten.reshape.default, found, shape) for found in (mean, rstd))]

    return _rule(call, outputs, known, write, sums=True)


@rule(aten.native_group_norm_backward.default)
def _group_norm_backward(call: Call) -> AxisRule:
    axes = _axes(call)
    outputs = (axes["input"], axes["weight"], axes["bias"])

    def write(writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        wants_x, *wants_parameters = named["output_mask"]
        view = _View(writer, named)
        x, grad = (view.channels(named[name]) for name in ("input", "grad_out"))
        mean, rstd = (view.of_each_channel(named[name]) for name in ("mean", "rstd"))
        sums = writer.call(ours.batch_norm_grad_sums.default, grad, x, mean, rstd)  # [2, N * C]
        by_sample = writer.call(aten.reshape.default, sums, [2, named["N"], named["C"]])
        totals = writer.call(aten.sum.dim_IntList, by_sample, [1])
        found = [
            writer.call(aten.select.int, totals, 0, place) if wanted else None
            for place, wanted in zip((1, 0), wants_parameters, strict=True)
        ]
        if not wants_x:
            return [None, *found]
        weight = view.of_each_sample(named["weight"])
        if weight is not None:
            sums = writer.call(aten.mul.Tensor, sums, weight)
            scale = writer.call(aten.reshape.default, weight, [1, -1, 1])
            dtype = grad.meta["val"].dtype
            grad = writer.call(aten._to_copy.default, writer.call(aten.mul.Tensor, grad, scale), dtype=dtype)
        members = writer.call(aten.reshape.default, sums, [2, view.groups, -1])
        of_groups = writer.redistribute(writer.call(aten.sum.dim_IntList, members, [2]), PARTIAL, REPLICATE)
        each = writer.call(aten.reshape.default, view.of_each_channel(of_groups), [2, -1])
        count = named["C"] // named["group"] * named["HxW"]
        grad_x = writer.call(ours.batch_norm_input_grad.default, grad, x, mean, rstd, None, each, count)
        return [writer.call(aten.reshape.default, grad_x, list(named["input"].meta["val"].shape)), *found]

    return _rule(call, outputs, {}, write, sums=call["output_mask"][0])


class _View:
    """A tensor [N, C, *] as one sample [1, N * C, *], and what belongs to it, for the parts of batch norm."""

    def __init__(self, writer: Writer, named: Mapping[str, Any]) -> None:
        self._writer = writer
        self._samples: int = named["N"]
        self._members: int = named["C"] // named["group"]
        self.groups: int = named["N"] * named["group"]

    def channels(self, x: Node) -> Node:
        """x: [N, C, *]; returns [1, N * C, places]."""
        return self._writer.call(aten.reshape.default, x, [1, self.groups * self._members, -1])

    def of_each_sample(self, x: Node | None) -> Node | None:
        """x: [C]; returns [N * C]."""
        return x if x is None else self._writer.call(aten.repeat.default, x, [self._samples])

    def of_each_channel(self, x: Node) -> Node:
        """x: [..., N, G] of some shape; returns [... * N * C], the same for all channels of a group."""
        rows = self._writer.call(aten.reshape.default, x, [-1, 1])
        wide = self._writer.call(aten.expand.default, rows, [-1, self._members])
        return self._writer.call(aten.reshape.default, wide, [-1])
