"""Operators that move all rows of a dimension to other places: along a split one they are exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.rules.rule import AxisRule, Call, Strategy, rule
from paceline.placement.rules.windows.halo import Halos, Windows, rerun, sliding
from paceline.placement.rules.words import all_but, labels_in
from paceline.placement.windows import Rows

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten


@rule(aten.roll.default)
def _roll(call: Call) -> AxisRule:
    shape, rank = call.inputs[0], len(call.inputs[0])
    dims = [d % rank for d in call["dims"]]
    axes, halos = (
        all_but(rank, dims or range(rank)),
        Halos(call),
    )  # without any it is the flat tensor that rolls
    if len(set(dims)) == len(dims):
        for shift, dim in zip(call["shifts"], dims, strict=False):
            windows = Windows(dim, shape[dim], shape[dim], sliding(shape[dim], 1, shift, 1), "wrap")

            def write(
                writer: Writer, named: Mapping[str, Any], strategy: Strategy, windows: Windows = windows
            ) -> list[Node | None]:
                x = windows.take(writer, named["self"])
                rest = [(s, d) for s, d in zip(call["shifts"], dims, strict=True) if d != windows.dim]
                if not rest:
                    return [x]
                shifts, others = (list(values) for values in zip(*rest, strict=True))
                return [rerun(writer, call, named, self=x, shifts=shifts, dims=others)]

            halos.offer(windows, ["self"], write, moved=[shape])
    return AxisRule((axes,), (axes,), labels_in([axes]), linear=((0,),), extra=halos.extra, written=halos.written)


@rule(aten.flip.default)
def _flip(call: Call) -> AxisRule:
    shape, rank = call.inputs[0], len(call.inputs[0])
    dims = {d % rank for d in call["dims"]}
    axes, halos = all_but(rank, dims), Halos(call)
    for dim in dims:
        size = shape[dim]

        def rows(parts: int, size: int = size) -> Rows:
            piece = size // parts
            return Rows(size - piece, -piece, piece)

        windows = Windows(dim, size, size, rows)

        def write(
            writer: Writer, named: Mapping[str, Any], strategy: Strategy, windows: Windows = windows
        ) -> list[Node | None]:
            return [rerun(writer, call, named, self=windows.take(writer, named["self"]))]

        halos.offer(windows, ["self"], write, moved=[shape])
    return AxisRule((axes,), (axes,), labels_in([axes]), linear=((0,),), extra=halos.extra, written=halos.written)
