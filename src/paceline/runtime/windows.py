"""Windows at run time: which rows travel between ranks, and how a window is put together from what arrives.

Which rows a rank needs, and which of its rows others need, is known when a graph is bound: they are cut out, sent in
one exchange, and joined. Each rank works out the same for all ranks, so nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from paceline.placement.windows import NOWHERE, Edge, Rows, Stretch, sources, stretches, window_sum

aten = torch.ops.aten
WINDOW = "window"
"""Mark of a started exchange for a window: makes the window of what has arrived."""


@dataclass(frozen=True)
class Layout:
    """The windows of all ranks on a tensor.

    Attributes:
        rows: where they lie.
        size: rows of the tensor.
        edge: what is beyond it.
        parts: ranks.
    """

    rows: Rows
    size: int
    edge: Edge
    parts: int

    @property
    def piece(self) -> int:
        """Rows of each rank's piece."""
        return self.size // self.parts

    def stretches(self, rank: int) -> list[Stretch]:
        """Return what the window of a rank consists of."""
        return list(_stretches(self, rank))

    def wanted(self, rank: int, owner: int) -> list[range]:
        """Return the rows of the owner's piece that another rank's window takes, in order."""
        if rank == owner:
            return []
        merged: list[range] = []
        taken = (stretch.taken for stretch in _stretches(self, rank) if stretch.owner == owner)
        for rows in sorted(taken, key=lambda rows: rows.start):
            if merged and rows.start <= merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(merged[-1].stop, rows.stop))
            else:
                merged.append(rows)
        return merged

    def count(self, rank: int, owner: int) -> int:
        """Return how many rows those are."""
        return sum(map(len, self.wanted(rank, owner)))

    def most_sent(self, *, adjoint: bool) -> int:
        """Return how many rows the rank sends that sends most; the adjoint sends what a window receives."""
        ranks = range(self.parts)
        counts = [[self.count(rank, owner) for owner in ranks] for rank in ranks]
        sent = counts if adjoint else list(zip(*counts, strict=True))
        return max(map(sum, sent))


@cache
def _stretches(layout: Layout, rank: int) -> tuple[Stretch, ...]:
    return tuple(stretches(layout.rows.of(rank), layout.size, layout.edge, layout.parts))


def layout_of(node: Node) -> tuple[int, Layout]:
    """Return the dimension and the layout of a call of `window` or `window_sum`."""
    values: tuple[Any, ...] = node.args
    x, dim, first, step, length = values[:5]
    edge, _, parts = values[-3:]
    size = values[5] if node.target is window_sum else x.meta["val"].shape[dim] * parts
    return dim, Layout(Rows(first, step, length), size, edge, parts)


def sent_bytes(node: Node) -> int:
    """Return how many bytes a rank sends for a window, at most."""
    dim, layout = layout_of(node)
    x: Any = node.args[0]
    value = x.meta["val"]
    rows = layout.most_sent(adjoint=node.target is window_sum)
    return int(rows * value.numel() // max(value.shape[dim], 1) * value.element_size())


# All ranks in one process: the whole tensor is there.


def window_of(pieces: Sequence[Tensor], index: int, dim: int, first: int, step: int, length: int, edge: Edge) -> Tensor:
    """Return the window of rank `index` from the pieces of all ranks."""
    whole = torch.cat(list(pieces), dim)
    rows = torch.from_numpy(sources(Rows(first, step, length).of(index), whole.shape[dim], edge)).to(whole.device)
    found = whole.index_select(dim, rows.clamp(min=0))
    shape = [-1 if d == dim else 1 for d in range(whole.ndim)]
    return torch.where((rows == NOWHERE).view(shape), torch.full_like(found, _filling(edge, whole.dtype)), found)


def window_sum_of(
    windows: Sequence[Tensor], index: int, dim: int, first: int, step: int, length: int, size: int, edge: Edge
) -> Tensor:
    """Return the piece of rank `index` of the sum of the windows of all ranks."""
    shape = list(windows[0].shape)
    shape[dim] = size + 1  # the last row takes what counts nowhere
    whole = windows[0].new_zeros(shape)
    for rank, x in enumerate(windows):
        rows = torch.from_numpy(sources(Rows(first, step, length).of(rank), size, edge))
        whole.index_add_(dim, rows.where(rows != NOWHERE, size).to(whole.device), x)
    piece = size // len(windows)
    return whole.narrow(dim, index * piece, piece)


def _filling(edge: Edge, dtype: torch.dtype) -> float:
    if edge == "lowest":
        return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min
    return float(edge) if not isinstance(edge, str) else 0.0


# One rank of several processes.


@dataclass(frozen=True)
class Parcels:
    """What a rank sends.

    Attributes:
        x: a tensor for each rank that gets something.
        given: how many numbers go to each rank.
        taken: how many come from each.
        most: how many there are in the largest parcel that any rank sends.
    """

    x: dict[int, Node]
    given: list[int]
    taken: list[int]
    most: int


@dataclass(frozen=True)
class Term:
    """Rows that count towards some rows of a sum."""

    place: range
    x: Node


class WindowBinding:
    """Writes the operators of one rank that make up a window, or a sum of windows.

    Args:
        graph: which they are added to, where it inserts.
        node: the call of `window` or `window_sum`.
        index: where this rank stands along the axis.
    """

    def __init__(self, graph: Graph, node: Node, index: int) -> None:
        self._graph = graph
        self._index = index
        self._dim, self._layout = layout_of(node)
        self._is_sum = node.target is window_sum
        x = node.args[0]
        assert isinstance(x, Node)
        self._x = x
        self._shape = tuple(x.meta["val"].shape)
        self._dtype = x.meta["val"].dtype
        self._kept: list[Term] = []

    def pack(self) -> Parcels:
        """Cut out what others need, and what is kept: the tensor itself is not needed any longer."""
        layout, ranks = self._layout, range(self._layout.parts)
        given = [self._numbers(self._count(rank, self._index)) for rank in ranks]
        taken = [self._numbers(self._count(self._index, rank)) for rank in ranks]
        most = max(self._numbers(self._count(rank, other)) for rank in ranks for other in ranks)
        cut = self._terms if self._is_sum else self._wanted
        parcels = {rank: cut(rank) for rank in ranks if given[rank]}
        if self._is_sum:
            self._kept = self._terms_for(self._index)
        else:
            mine = {stretch.taken for stretch in layout.stretches(self._index) if stretch.owner == self._index}
            self._kept = [Term(rows, self._slice(self._x, rows)) for rows in sorted(mine, key=lambda rows: rows.start)]
        return Parcels(parcels, given, taken, most)

    def flat(self, parcels: Parcels) -> Node:
        """Return all parcels as one flat tensor, in the order of ranks."""
        rows = [self._call(aten.reshape.default, x, [-1]) for x in parcels.x.values()]
        return self._joined(rows, 0) if rows else self._call(aten.new_empty.default, self._x, [0])

    def unpack(self, arrived: Node, parcels: Parcels, starts: Sequence[int]) -> Node:
        """Return the window, or this rank's piece of the sum.

        Args:
            arrived: a flat tensor of what other ranks have sent.
            parcels: how much that is.
            starts: where in it each rank's is.
        """
        parts = {}
        for rank, (start, size) in enumerate(zip(starts, parcels.taken, strict=True)):
            if size:
                rows = self._call(aten.slice.Tensor, arrived, 0, start, start + size)
                parts[rank] = self._call(aten.reshape.default, rows, self._sized(self._count(self._index, rank)))
        return self._summed(parts) if self._is_sum else self._windowed(parts)

    def _count(self, taker: int, giver: int) -> int:
        """How many rows travel from one rank to another."""
        return self._layout.count(giver, taker) if self._is_sum else self._layout.count(taker, giver)

    # Windows.

    def _wanted(self, rank: int) -> Node:
        """The rows that another rank needs of this one's."""
        return self._joined([self._slice(self._x, rows) for rows in self._layout.wanted(rank, self._index)], self._dim)

    def _windowed(self, parts: dict[int, Node]) -> Node:
        kept = {term.place: term.x for term in self._kept}
        found = []
        for stretch in self._layout.stretches(self._index):
            if stretch.owner == NOWHERE:
                filling = _filling(self._layout.edge, self._dtype)
                found.append(self._call(aten.new_full.default, self._x, self._sized(stretch.count), filling))
            elif stretch.owner == self._index:
                found.append(self._in_order(kept[stretch.taken], stretch))
            else:
                place = _position(self._layout.wanted(self._index, stretch.owner), stretch.taken)
                found.append(self._in_order(self._slice(parts[stretch.owner], place), stretch))
        return self._owned(self._joined(found, self._dim))

    def _in_order(self, rows: Node, stretch: Stretch) -> Node:
        """The rows that a stretch takes, as the window has them."""
        if stretch.stride < 0:
            return self._call(aten.flip.default, rows, [self._dim])
        if stretch.stride == 0:
            return self._call(aten.expand.default, rows, self._sized(stretch.count))
        return rows

    # Sums of windows.

    def _terms_for(self, owner: int) -> list[Term]:
        """What this rank's window has for the rows of a rank."""
        found, begin = [], 0
        for stretch in self._layout.stretches(self._index):
            if stretch.owner == owner:
                rows = self._slice(self._x, range(begin, begin + stretch.count))
                found.append(Term(stretch.taken, self._out_of_order(rows, stretch)))
            begin += stretch.count
        return found

    def _out_of_order(self, rows: Node, stretch: Stretch) -> Node:
        """The adjoint of `_in_order`."""
        if stretch.stride < 0:
            return self._call(aten.flip.default, rows, [self._dim])
        if stretch.stride == 0:
            return self._call(aten.sum.dim_IntList, rows, [self._dim], True)
        return rows

    def _terms(self, owner: int) -> Node:
        """What this rank sends for the rows of another."""
        wanted = self._layout.wanted(self._index, owner)
        terms = [Term(_position(wanted, term.place), term.x) for term in self._terms_for(owner)]
        return self._added(terms, sum(map(len, wanted)))

    def _summed(self, parts: dict[int, Node]) -> Node:
        terms = list(self._kept)
        for rank, rows in parts.items():
            wanted = self._layout.wanted(rank, self._index)
            terms += [Term(place, self._slice(rows, _position(wanted, place))) for place in wanted]
        return self._owned(self._added(terms, self._layout.piece))

    def _added(self, terms: list[Term], count: int) -> Node:
        """The sum of terms, a tensor of so many rows."""
        terms = sorted(terms, key=lambda term: (term.place.start, term.place.stop))
        ends = [0, *(term.place.stop for term in terms)]
        if ends[-1] == count and all(term.place.start == end for term, end in zip(terms, ends, strict=False)):
            return self._joined([term.x for term in terms], self._dim)
        if not terms:
            return self._call(aten.new_zeros.default, self._x, self._sized(count))
        most = max(terms, key=lambda term: len(term.place))
        around = [0, 0] * (len(self._shape) - 1 - self._dim) + [most.place.start, count - most.place.stop]
        total = self._call(aten.constant_pad_nd.default, most.x, around)
        for term in terms:
            if term is not most:
                self._call(aten.add_.Tensor, self._slice(total, term.place), term.x)
        return total

    # Words.

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self._graph.call_function(target, args, kwargs)

    def _slice(self, x: Node, rows: range) -> Node:
        return self._call(aten.slice.Tensor, x, self._dim, rows.start, rows.stop)

    def _joined(self, pieces: list[Node], dim: int) -> Node:
        return pieces[0] if len(pieces) == 1 else self._call(aten.cat.default, pieces, dim)

    def _owned(self, x: Node) -> Node:
        """The tensor in memory of its own: kernels such as layer norm's backward assume that pieces are contiguous."""
        is_new = x.target in (aten.cat.default, aten.new_zeros.default, aten.constant_pad_nd.default)
        return x if is_new else self._call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def _sized(self, rows: int) -> list[int]:
        return [*self._shape[: self._dim], rows, *self._shape[self._dim + 1 :]]

    def _numbers(self, rows: int) -> int:
        return prod(self._sized(rows))


def _position(ranges: Sequence[range], rows: range) -> range:
    """Return where some rows are among those of ranges, one after the other; one of the ranges has them all."""
    begin = 0
    for have in ranges:
        if have.start <= rows.start and rows.stop <= have.stop:
            return range(begin + rows.start - have.start, begin + rows.stop - have.start)
        begin += len(have)
    raise AssertionError(f"nobody has sent the rows {rows}")
