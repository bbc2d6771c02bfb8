"""Indices into a dimension of which a rank holds a piece, for the rules that write strategies with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from paceline.program import indices  # noqa: F401  (registers the operator)

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
ours = torch.ops.paceline
_ELSEWHERE = -(1 << 30)
"""A place that nobody means."""


def size_at(node: Node, dim: int) -> int:
    """Return the size of a dimension of a rank's piece."""
    size: int = node.meta["val"].shape[dim]
    return size


def local_index(writer: Writer, index: Node, size: int, outside: int, *, wrap: bool = False) -> Node:
    """Return places in the rank's piece, which has `size` rows; `outside` for rows of other ranks."""
    coordinate = writer.coordinate()
    return writer.call(ours.local_index.default, index, coordinate, size, size * writer.parts, outside, wrap)


def local_or_first(writer: Writer, index: Node, size: int, *, wrap: bool = False) -> tuple[Node, Node]:
    """Return places in the rank's piece, the first one for rows of other ranks, and which those are."""
    found = local_index(writer, index, size, _ELSEWHERE, wrap=wrap)
    elsewhere = writer.call(aten.eq.Scalar, found, _ELSEWHERE)
    return writer.call(aten.masked_fill.Scalar, found, elsewhere, 0), elsewhere


def zero_at(writer: Writer, values: Node, elsewhere: Node, trailing: int = 0) -> Node:
    """Set values to zero at the places of other ranks; `trailing` dimensions of the values come after the places."""
    return writer.call(aten.masked_fill.Scalar, values, _with_trailing(writer, elsewhere, trailing), 0)


def _with_trailing(writer: Writer, mask: Node, trailing: int) -> Node:
    shape = list(mask.meta["val"].shape)
    return writer.call(aten.reshape.default, mask, shape + [1] * trailing) if trailing else mask
