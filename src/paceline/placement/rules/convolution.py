"""Convolution and its gradient.

In groups: input channels are (g, c), output channels (g, o). Splitting `g` gives whole groups to a rank, `o` a part of
every group's results, `c` a partial sum. Without groups there is one. A place may be split along a dimension whose
windows do not overlap, as in the patches of a vision transformer.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.placement.placements import PARTIAL, REPLICATE
from paceline.placement.rules.rule import Axes, AxisRule, Call, Factors, Label, Strategy, rule
from paceline.placement.rules.words import named, shape_of

aten = torch.ops.aten


def _places(call: Call) -> tuple[Axes, Axes]:
    """Axes of the places of input and output: `s0` numbers the windows where they tile the input without overlap."""
    sizes, windows = shape_of(call, "input")[2:], shape_of(call, "weight")[2:]
    before: list[Label | Factors | None] = []
    after: list[Label | Factors | None] = []

    def along(values: list[int], dim: int) -> int:
        return values[dim] if len(values) > 1 else values[0]

    for dim, (size, window) in enumerate(zip(sizes, windows, strict=True)):
        tiled = (
            not call["transposed"]
            and window == along(call["stride"], dim)
            and size % window == 0
            and along(call["padding"], dim) == 0
            and (window == 1 or along(call["dilation"], dim) == 1)
        )
        label = f"s{dim}" if tiled else None
        before.append(Factors(((label, size // window), (None, window))) if tiled and window > 1 else label)
        after.append(label)
    return tuple(before), tuple(after)


def _axes(call: Call) -> dict[str, Axes]:
    groups, transposed = call["groups"], call["transposed"]
    weight = shape_of(call, "weight")
    members_in = weight[0] // groups if transposed else weight[1]
    members_out = weight[1] if transposed else weight[0] // groups

    def grouped(label: Label, members: int) -> Label | Factors:
        return label if groups == 1 else Factors((("g", groups), (label, members)))

    channels_in, channels_out = grouped("c", members_in), grouped("o", members_out)
    window = (None,) * (len(weight) - 2)
    before, after = _places(call)
    return {
        "input": ("n", channels_in, *before),
        "weight": (channels_in, "o", *window) if transposed else (channels_out, "c", *window),
        "bias": (channels_out,),
        "output": ("n", channels_out, *after),
    }


def _split(axes: dict[str, Axes]) -> frozenset[Label]:
    places = {label for label in axes["output"][2:] if label is not None}
    return frozenset({"n", "c", "o", "g"} | places)


@rule(aten.convolution.default)
def _convolution(call: Call) -> AxisRule:
    def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
        return {"groups": arguments["groups"] // parts} if strategy.label == "g" else {}

    axes = _axes(call)
    return AxisRule(named(call, axes), (axes["output"],), _split(axes), pinned={("c", 2): PARTIAL}, localize=localize)


@rule(aten.convolution_backward.default)
def _convolution_backward(call: Call) -> AxisRule:
    def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        if strategy.label == "g":
            changed["groups"] = arguments["groups"] // parts
        bias_sizes = arguments["bias_sizes"]
        if strategy.label in ("g", "o") and bias_sizes and bias_sizes != [0]:
            changed["bias_sizes"] = [bias_sizes[0] // parts]
        return changed

    axes = _axes(call)
    axes["grad_output"] = axes["output"]
    return AxisRule(
        named(call, axes),
        (axes["input"], axes["weight"], axes["bias"]),
        _split(axes),
        results={("c", 2): REPLICATE},  # the bias's gradient does not see the input channels
        localize=localize,
    )
