"""Convolution and its gradient.

In groups: input channels are (g, c), output channels (g, o). Splitting `g` gives whole groups to a rank, `o` a part of
every group's results, `c` a partial sum. Without groups there is one. Places may be split too: where windows tile the
input, as in the patches of a vision transformer, each rank has its own; elsewhere neighbours exchange a halo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import PARTIAL, REPLICATE, Shape, Shard
from paceline.placement.rules.rule import Axes, AxisRule, Call, Factors, Label, Strategy, rule
from paceline.placement.rules.windows.halo import Halos, Windows, rerun, sliding, with_item
from paceline.placement.rules.words import named, shape_of

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten


def _along(values: Sequence[int], dim: int) -> int:
    return values[dim] if len(values) > 1 else values[0]


def _is_tiled(call: Call, dim: int) -> bool:
    """Whether windows lie side by side along a place, without overlap, gap or rest."""
    size, window = shape_of(call, "input")[2 + dim], shape_of(call, "weight")[2 + dim]
    return (
        not call["transposed"]
        and window == _along(call["stride"], dim)
        and size % window == 0
        and _along(call["padding"], dim) == 0
        and (window == 1 or _along(call["dilation"], dim) == 1)
    )


def _places(call: Call) -> tuple[Axes, Axes]:
    """Axes of the places of input and output: `s0` numbers the windows where they tile the input."""
    sizes, windows = shape_of(call, "input")[2:], shape_of(call, "weight")[2:]
    before: list[Label | Factors | None] = []
    after: list[Label | Factors | None] = []
    for dim, (size, window) in enumerate(zip(sizes, windows, strict=True)):
        label = f"s{dim}" if _is_tiled(call, dim) else None
        before.append(Factors(((label, size // window), (None, window))) if label and window > 1 else label)
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


class _Place:
    """A place of a convolution along which windows do not tile the input.

    Transposed, it is the adjoint of a convolution: windows of its output are what each of its inputs adds to.
    """

    def __init__(self, call: Call, dim: int, output: Shape) -> None:
        self._call = call
        self._dim = dim
        self.transposed: bool = call["transposed"]
        before, after = shape_of(call, "input")[2 + dim], output[2 + dim]
        extent = _along(call["dilation"], dim) * (shape_of(call, "weight")[2 + dim] - 1) + 1
        size, out = (after, before) if self.transposed else (before, after)
        stride, padding = _along(call["stride"], dim), _along(call["padding"], dim)
        self.windows = Windows(2 + dim, size, out, sliding(out, stride, padding, extent))

    def unpadded(self) -> dict[str, list[int]]:
        """Return the arguments of the convolution of a window."""
        count = len(shape_of(self._call, "weight")) - 2
        return {
            name: with_item([_along(self._call[name], dim) for dim in range(count)], self._dim, 0)
            for name in ("padding", "output_padding")
        }

    def forward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write the convolution."""
        if not self.transposed:
            x = self.windows.take(writer, named["input"])
            return [rerun(writer, self._call, named, input=x, **self.unpadded())]
        y = self.windows.add(writer, rerun(writer, self._call, named, bias=None, **self.unpadded()))
        if named["bias"] is None:
            return [y]
        shape = [1, -1, *(1,) * (y.meta["val"].ndim - 2)]
        return [writer.call(aten.add.Tensor, y, writer.call(aten.reshape.default, named["bias"], shape))]

    def backward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write its gradients."""
        return self._backward_transposed(writer, named) if self.transposed else self._backward(writer, named)

    def _backward(self, writer: Writer, named: Mapping[str, Any]) -> list[Node | None]:
        wants_weight = named["output_mask"][1]  # for the gradient of the input alone its shape is enough
        x = (self.windows.take if wants_weight else self.windows.like)(writer, named["input"])
        grads = self._gradients(writer, {**named, "input": x})
        return [grads[0] and self.windows.add(writer, grads[0]), *grads[1:]]

    def _backward_transposed(self, writer: Writer, named: Mapping[str, Any]) -> list[Node | None]:
        wants_input, wants_weight, wants_bias = named["output_mask"]
        grad = named["grad_output"]
        window = self.windows.take(writer, grad)
        changed = {"grad_output": window, "output_mask": [wants_input, wants_weight, False]}
        grads = self._gradients(writer, {**named, **changed})
        if wants_bias:  # windows overlap, and a bias adds to each place once
            dims = [d for d in range(grad.meta["val"].ndim) if d != 1]
            grads[2] = writer.call(aten.sum.dim_IntList, grad, dims)
        return grads

    def _gradients(self, writer: Writer, named: Mapping[str, Any]) -> list[Node | None]:
        found = rerun(writer, self._call, named, **self.unpadded())
        return [writer.item(found, i) if wanted else None for i, wanted in enumerate(named["output_mask"])]


def _halo_places(call: Call, output: Shape) -> list[_Place]:
    return [_Place(call, dim, output) for dim in range(len(output) - 2) if not _is_tiled(call, dim)]


@rule(aten.convolution.default)
def _convolution(call: Call) -> AxisRule:
    def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
        return {"groups": arguments["groups"] // parts} if strategy.label == "g" else {}

    axes = _axes(call)
    halos, output = Halos(call), call.outputs[0] or ()
    for place in _halo_places(call, output):
        halos.offer(place.windows, ["input"], place.forward, moved=[output if place.transposed else call.inputs[0]])
    return AxisRule(
        named(call, axes),
        (axes["output"],),
        _split(axes),
        pinned={("c", 2): PARTIAL},
        localize=localize,
        extra=halos.extra,
        written=halos.written,
    )


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
    halos, (inputs, grad) = Halos(call), (shape_of(call, name) for name in ("input", "grad_output"))
    for place in _halo_places(call, grad):
        halos.offer(
            place.windows,
            ["grad_output", "input"],
            place.backward,
            moved=[grad] if place.transposed else [inputs, inputs],
            outputs=(Shard(place.windows.dim), PARTIAL, PARTIAL),
        )
    return AxisRule(
        named(call, axes),
        (axes["input"], axes["weight"], axes["bias"]),
        _split(axes),
        results={("c", 2): REPLICATE},  # the bias's gradient does not see the input channels
        localize=localize,
        extra=halos.extra,
        written=halos.written,
    )
