"""Words for strategies that read across the cut between ranks, and the rules of what they write for later axes.

Results along a dimension, such as those of a convolution, are computed from windows of it. Where the dimension is
split, a rank takes the rows that its results need (`Windows.take`), runs the operator on them without padding, and in
the backward pass adds what it has for those rows to where they came from (`Windows.add`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import REPLICATE, Placement, Shape, Shard
from paceline.placement.rules.rule import Axes, AxisRule, Call, Move, Strategy, Write, Written, rule
from paceline.placement.rules.words import labels_in, numbered, slot
from paceline.placement.windows import Edge, Rows, foreign_rows, window, window_sum

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
_LINE = 64
"""Bytes that come from memory at once."""


@dataclass(frozen=True)
class Windows:
    """What results along a dimension are computed from.

    Attributes:
        dim: the dimension.
        size: its size.
        out: how many results there are.
        rows: ranks -> the rows that each needs for its share of the results.
        edge: what is beyond the tensor.
    """

    dim: int
    size: int
    out: int
    rows: Callable[[int], Rows]
    edge: Edge = 0

    @property
    def divides(self) -> bool:
        """Whether there is a number of ranks over which both rows and results divide."""
        return gcd(self.size, self.out) > 1

    def length(self, parts: int) -> int:
        """Return how many rows each of so many ranks needs."""
        return self.rows(parts).length

    def is_local(self, parts: int) -> bool:
        """Whether each of so many ranks has what it needs."""
        return self.rows(parts).is_local(self.size // parts)

    def take(self, writer: Writer, x: Node) -> Node:
        """Return the rows that this rank's results are computed from; x: this rank's rows."""
        rows, piece = self.rows(writer.parts), self.size // writer.parts
        if not rows.is_local(piece):
            where = self.dim, rows.first, rows.step, rows.length, self.edge
            return writer.call(window, x, *where, writer.axis, writer.parts)
        if rows.length == piece:
            return x
        return writer.call(aten.slice.Tensor, x, self.dim, rows.first, rows.first + rows.length)

    def add(self, writer: Writer, x: Node) -> Node:
        """The adjoint: return the sums of what all ranks have for this rank's rows; x: as `take` returned it."""
        rows, piece = self.rows(writer.parts), self.size // writer.parts
        if not rows.is_local(piece):
            where = self.dim, rows.first, rows.step, rows.length, self.size, self.edge
            return writer.call(window_sum, x, *where, writer.axis, writer.parts)
        if rows.length == piece:
            return x
        around = [0, 0] * (x.meta["val"].ndim - 1 - self.dim) + [rows.first, piece - rows.first - rows.length]
        return writer.call(aten.constant_pad_nd.default, x, around)

    def like(self, writer: Writer, x: Node) -> Node:
        """Return a tensor of the shape that `take` gives, for operators that only look at that; x is not kept."""
        value = x.meta["val"]
        size = self.resized(value.shape, writer.parts)
        return writer.call(aten.empty.memory_format, size, dtype=value.dtype, device=value.device)

    def resized(self, shape: Sequence[int], parts: int) -> list[int]:
        """Return the shape of a tensor whose rows are those that a rank needs."""
        return with_item(shape, self.dim, self.length(parts))

    def move(self, shape: Shape, dtype: torch.dtype) -> Move:
        """Return what an exchange costs: that of the rows that a rank has not, between as few ranks as can be.

        Rows of an inner dimension, such as the columns of an image, lie scattered in memory: a few bytes cost a line.
        """
        common = gcd(self.size, self.out)
        parts = next(n for n in range(2, common + 1) if common % n == 0)
        rows = foreign_rows(self.rows(parts), self.size, self.edge, parts)
        run = rows * prod(shape[self.dim + 1 :]) * dtype.itemsize
        sent = prod(shape[: self.dim]) * (max(run, _LINE) if run else 0)
        # An all-to-all of n bytes sends n / parts * (parts - 1) / parts from each rank.
        return Move(sent * parts * parts // (parts - 1), Shard(self.dim), Shard(self.dim + 1))


def sliding(out: int, stride: int, before: int, extent: int) -> Callable[[int], Rows]:
    """Return the rows of windows of `extent` rows, the first of which begins `before` the tensor, each `stride` on."""

    def rows(parts: int) -> Rows:
        share = out // parts
        return Rows(-before, share * stride, (share - 1) * stride + extent)

    return rows


def with_item(values: Sequence[int], index: int, value: int) -> list[int]:
    """Return a list of numbers with one of them replaced."""
    changed = list(values)
    changed[index] = value
    return changed


def rerun(writer: Writer, call: Call, arguments: Mapping[str, Any], **changed: Any) -> Node:
    """Call the operator with some arguments changed."""
    return writer.call(call.target, *{**arguments, **changed}.values())


class Halos:
    """The written strategies of a call, one for each dimension that may be split with an exchange."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.extra: tuple[Strategy, ...] = ()
        self.written: dict[Any, Written] = {}

    def offer(
        self,
        windows: Windows,
        split: Sequence[str],
        write: Write,
        *,
        moved: Sequence[Shape],
        given: Shard | None = None,
        outputs: Sequence[Placement] | None = None,
    ) -> None:
        """Offer to split the dimension of some windows.

        Args:
            windows: what the results are computed from.
            split: names of the tensors that are split, along that dimension; the others are whole.
            write: how it is done.
            moved: shapes of the whole tensors of which windows are taken, or to which they are added.
            given: how the tensors are split, where it is not along that dimension.
            outputs: placements of the results, where they are not all split along it.
        """
        call, shard = self._call, Shard(windows.dim)
        if not windows.divides:
            return
        slots = {slot(call, name) for name in split}
        label = f"rows {windows.dim}"
        placed = [shard] * len(call.outputs) if outputs is None else outputs
        self.extra += (
            Strategy(
                tuple((given or shard) if i in slots else REPLICATE for i in range(len(call.inputs))),
                tuple(REPLICATE if shape is None else p for p, shape in zip(placed, call.outputs, strict=True)),
                label,
            ),
        )
        moves = [windows.move(shape, call.dtypes[0]) for shape in moved]
        self.written[label] = Written(write, tuple(move for move in moves if move.nbytes))


@rule(window, window_sum)
def _window(call: Call) -> AxisRule:
    """Along a later axis other dimensions may be split. It is linear where nothing but zeros is filled in."""
    dim, edge = call["1"], call["6" if call.target is window_sum else "5"]
    axes: Axes = tuple(None if d == dim else label for d, label in enumerate(numbered(len(call.inputs[0]))))
    linear = call.target is window_sum or edge in ("nearest", "reflect", "wrap") or edge == 0
    return AxisRule((axes,), (axes,), labels_in([axes]), linear=((0,),) if linear else ())
