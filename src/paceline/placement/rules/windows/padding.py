"""Padding: what is not padded may be split; what is as well, where sizes before and after divide, with an exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.rules.rule import Axes, AxisRule, Call, Strategy, rule
from paceline.placement.rules.windows.halo import Halos, Windows, rerun, sliding
from paceline.placement.rules.words import labels_in, numbered, shape_of
from paceline.placement.windows import Edge

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten


def _amounts(values: list[int], rank: int) -> dict[int, tuple[int, int]]:
    """Return how much is added before and behind each dimension; operators name the last dimension first."""
    pairs = zip(values[::2], values[1::2], strict=True)
    return {rank - 1 - place: pair for place, pair in enumerate(pairs) if pair != (0, 0)}


class _Padding:
    """A padding, seen along one of its dimensions."""

    def __init__(self, call: Call, dim: int, name: str, edge: Edge) -> None:
        self._call = call
        self._name = name
        size, rank = shape_of(call, "self")[dim], len(shape_of(call, "self"))
        before, behind = _amounts(call[name], rank)[dim]
        first = 2 * (rank - 1 - dim)
        self._rest = {name: [n if place // 2 * 2 != first else 0 for place, n in enumerate(call[name])]}
        out = size + before + behind
        self.windows = Windows(dim, size, out, sliding(out, 1, before, 1), edge)

    def forward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write the padding; what is beyond an edge is part of a window."""
        x = self.windows.take(writer, named["self"])
        return [rerun(writer, self._call, named, self=x, **self._rest) if any(self._rest[self._name]) else x]

    def backward(self, writer: Writer, named: Mapping[str, Any], strategy: Strategy) -> list[Node | None]:
        """Write its gradient, which depends on the shape of the input only."""
        grad = named["grad_output"]
        if any(self._rest[self._name]):
            like = self.windows.like(writer, named["self"])
            grad = rerun(writer, self._call, named, self=like, **self._rest)
        return [self.windows.add(writer, grad)]


def _padding(call: Call, name: str, edge: Edge, *, linear: bool) -> AxisRule:
    before, backward = shape_of(call, "self"), "grad_output" in call.arguments
    padded, halos = _amounts(call[name], len(before)), Halos(call)
    for dim in padded:
        padding = _Padding(call, dim, name, edge)
        write = padding.backward if backward else padding.forward
        halos.offer(padding.windows, list(call.arguments), write, moved=[before])
    axes: Axes = tuple(None if d in padded else label for d, label in enumerate(numbered(len(before))))
    return AxisRule(
        (axes,) * len(call.inputs),
        (axes,),
        labels_in([axes]),
        linear=((0,),) if linear else (),
        extra=halos.extra,
        written=halos.written,
    )


@rule(aten.constant_pad_nd.default)
def _constant(call: Call) -> AxisRule:
    return _padding(call, "pad", call["value"], linear=call["value"] == 0)


@rule(
    *(getattr(aten, f"reflection_pad{n}d").default for n in (1, 2, 3)),
    *(getattr(aten, f"reflection_pad{n}d_backward").default for n in (1, 2, 3)),
)
def _reflection(call: Call) -> AxisRule:
    return _padding(call, "padding", "reflect", linear=True)


@rule(
    *(getattr(aten, f"replication_pad{n}d").default for n in (1, 2, 3)),
    *(getattr(aten, f"replication_pad{n}d_backward").default for n in (1, 2, 3)),
)
def _replication(call: Call) -> AxisRule:
    return _padding(call, "padding", "nearest", linear=True)
