"""What is written where the dimension that is indexed is itself split over ranks, in contiguous pieces.

Each rank reads the rows that it has and takes zero for those of others: the sum over ranks is the result. Each rank
writes to the rows that it has: what goes to those of others adds zero, or lands in one row more, which is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.rules.localized import local_index, local_or_first, size_at, zero_at
from paceline.placement.rules.rule import Strategy, Write

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
Arguments = Mapping[str, Any]


def _where(arguments: Arguments) -> tuple[Node, int, int]:
    """Return the tensor that is indexed, the dimension, and the number of dimensions behind it."""
    x = arguments["self"]
    rank = x.meta["val"].ndim
    dim = arguments["dim"] % rank
    return x, dim, rank - 1 - dim


def gather(writer: Writer, arguments: Arguments, strategy: Strategy) -> Sequence[Node]:
    """Write `gather`: an index for each element of the result."""
    x, dim, _ = _where(arguments)
    local, elsewhere = local_or_first(writer, arguments["index"], size_at(x, dim))
    return [zero_at(writer, writer.call(aten.gather.default, x, dim, local), elsewhere)]


def index_select(writer: Writer, arguments: Arguments, strategy: Strategy) -> Sequence[Node]:
    """Write `index_select`: an index for each row of the result."""
    x, dim, behind = _where(arguments)
    local, elsewhere = local_or_first(writer, arguments["index"], size_at(x, dim))
    return [zero_at(writer, writer.call(aten.index_select.default, x, dim, local), elsewhere, behind)]


def scatter_add(writer: Writer, arguments: Arguments, strategy: Strategy) -> Sequence[Node]:
    """Write `scatter_add`: an index for each element of the source."""
    x, dim, _ = _where(arguments)
    local, elsewhere = local_or_first(writer, arguments["index"], size_at(x, dim))
    return [writer.call(aten.scatter_add.default, x, dim, local, zero_at(writer, arguments["src"], elsewhere))]


def index_add(writer: Writer, arguments: Arguments, strategy: Strategy) -> Sequence[Node]:
    """Write `index_add`: an index for each row of the source."""
    x, dim, behind = _where(arguments)
    local, elsewhere = local_or_first(writer, arguments["index"], size_at(x, dim))
    source = zero_at(writer, arguments["source"], elsewhere, behind)
    return [writer.call(aten.index_add.default, x, dim, local, source, alpha=arguments["alpha"])]


def scatter(target: Any) -> Write:
    """Write a scatter that sets, or that reduces otherwise than by a sum."""

    def write(writer: Writer, arguments: Arguments, strategy: Strategy) -> Sequence[Node]:
        x, dim, _ = _where(arguments)
        size = size_at(x, dim)
        local = local_index(writer, arguments["index"], size, size)
        rest = [value for name, value in arguments.items() if name not in ("self", "dim", "index", "include_self")]
        options = {name: value for name, value in arguments.items() if name == "include_self"}
        return [_cut(writer, writer.call(target, _with_row(writer, x, dim), dim, local, *rest, **options), dim, size)]

    return write


def index(dim: int, trailing: int) -> Write:
    """Write advanced indexing of which dimension `dim` is split; `trailing` dimensions come behind the places."""

    def write(writer: Writer, arguments: Arguments, strategy: Strategy) -> Sequence[Node]:
        x, indices = arguments["self"], list(arguments["indices"])
        indices[dim], elsewhere = local_or_first(writer, indices[dim], size_at(x, dim), wrap=True)
        return [zero_at(writer, writer.call(aten.index.Tensor, x, indices), elsewhere, trailing)]

    return write


def index_put(dim: int, trailing: int) -> Write:
    """Write advanced assignment or addition of which dimension `dim` is split."""

    def write(writer: Writer, arguments: Arguments, strategy: Strategy) -> Sequence[Node]:
        x, indices, values = arguments["self"], list(arguments["indices"]), arguments["values"]
        size = size_at(x, dim)
        if arguments["accumulate"]:
            indices[dim], elsewhere = local_or_first(writer, indices[dim], size, wrap=True)
            values = zero_at(writer, values, elsewhere, trailing)
            return [writer.call(aten.index_put.default, x, indices, values, True)]
        indices[dim] = local_index(writer, indices[dim], size, size, wrap=True)
        return [
            _cut(writer, writer.call(aten.index_put.default, _with_row(writer, x, dim), indices, values), dim, size)
        ]

    return write


def _with_row(writer: Writer, x: Node, dim: int) -> Node:
    behind = x.meta["val"].ndim - 1 - dim
    return writer.call(aten.constant_pad_nd.default, x, [0, 0] * behind + [0, 1])


def _cut(writer: Writer, x: Node, dim: int, size: int) -> Node:
    cut = writer.call(aten.slice.Tensor, x, dim, 0, size)
    return writer.call(aten.clone.default, cut, memory_format=torch.contiguous_format)
