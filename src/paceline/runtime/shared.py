"""Communications of a graph among ranks that share memory: what is sent is computed where the others will read it.

A bucket of gradients is room in shared memory. Matrix products write into it, other gradients are copied into it when
they are made, and peers add them up there: no gradient is packed, sent or unpacked.

A parameter that is split over ranks which share memory is one tensor of all of them, of which each updates its row. To
gather it is to look at it. Between fences at both ends of a graph nobody changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from paceline.runtime import collectives
from paceline.runtime.passes.views import is_fresh, is_view
from paceline.runtime.windows import Parcels
from paceline.shm import Exchange

aten = torch.ops.aten
MEMBERS = "members"
"""Mark of a started communication whose result is a list, with its length."""


class _Call(nn.Module):
    """A function that a graph calls by the name of a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


class SharedBinding:
    """Binds communications along one axis.

    Args:
        graph: whose nodes are bound.
        root: the module of the graph, which gets the functions that it calls.
        axis: name of the axis.
        exchange: how its ranks exchange.
    """

    def __init__(self, graph: Graph, root: nn.Module, axis: str, exchange: Exchange) -> None:
        self._graph = graph
        self._root = root
        self._axis = axis
        self._exchange = exchange

    def start(self, node: Node) -> Node:
        """Return the call that starts what `node` starts, and put its input where peers can read it."""
        x = node.args[0]
        assert isinstance(x, Node)
        match node.target:
            case collectives.all_reduce:
                return self._call("all_reduce", self._exchange.all_reduce, x)
            case collectives.all_reduce_in_place:
                bucket = self._in_room(_members(x))
                return self._call("all_reduce_in_place", self._exchange.all_reduce_in_place, bucket)
            case collectives.reduce_scatter:
                members = _members(x)
                sizes = [member.meta["val"].shape[1] for member in members]
                bucket = self._in_room(members)
                return self._call("reduce_scatter", self._exchange.reduce_scatter, bucket, sizes)
            case collectives.all_gather:
                return self._gather(_members(x))
            case _:
                return self._call("all_to_all", self._exchange.all_to_all, x)

    def parcels(self, parcels: Parcels, dtype: torch.dtype) -> Node:
        """Start an exchange of what is cut out for each rank; the result has as much room for each as the largest."""
        ranks = len(parcels.given)
        room = self._room(dtype, parcels.most * ranks)
        for rank, x in parcels.x.items():
            part = (room, 0, rank * parcels.most, parcels.given[rank])
            target = self._graph.call_function(aten.narrow.default, part)
            flat = self._graph.call_function(aten.reshape.default, (x, [-1]))
            self._graph.call_function(aten.copy_.default, (target, flat))
        return self._call("all_to_all", self._exchange.all_to_all, room)

    def _room(self, dtype: torch.dtype, size: int) -> Node:
        """Return a flat tensor in shared memory."""
        return self._call(f"room_{str(dtype).removeprefix('torch.')}", partial(self._exchange.empty, dtype=dtype), size)

    def _call(self, name: str, function: Callable[..., Any], *args: Any) -> Node:
        name = f"{name}_{self._axis}"
        if not hasattr(self._root, name):
            self._root.add_module(name, _Call(function))
        return self._graph.call_module(name, args)

    def _gather(self, members: Sequence[Node]) -> Node:
        """Gather each member of a bucket by itself: what lies in shared memory costs nothing to gather."""
        if any(_is_held(member) for member in members):
            self._fence()
        node = self._call("all_gather", partial(_Gathering, self._exchange), list(members))
        node.meta[MEMBERS] = len(members)
        return node

    def _fence(self) -> None:
        """Let all ranks begin and end this graph together."""
        if hasattr(self._root, f"fence_{self._axis}"):
            return
        first = next(node for node in self._graph.nodes if node.op not in ("placeholder", "get_attr"))
        last = next(node for node in reversed(self._graph.nodes) if node.op == "output")
        for place in (first, last):
            with self._graph.inserting_before(place):
                self._call("fence", self._exchange.fence)

    def _in_room(self, members: Sequence[Node]) -> Node:
        """Return one flat tensor in shared memory that holds the members, one after the other."""
        order = {node: place for place, node in enumerate(self._graph.nodes)}
        makers = [_product_behind(member) or member for member in members]
        first = min(makers, key=lambda node: order[node])
        while first.op in ("placeholder", "get_attr"):
            first = first.next
        dtype = members[0].meta["val"].dtype
        sizes = [member.meta["val"].numel() for member in members]
        with self._graph.inserting_before(first):
            room = self._room(dtype, sum(sizes))
        begin = 0
        for member, maker, size in zip(members, makers, sizes, strict=True):
            before = order[maker] < order[first]
            self._write(member, maker, room if before else maker, (room, 0, begin, size))
            begin += size
        return room

    def _write(self, member: Node, maker: Node, after: Node, part: tuple[Node, int, int, int]) -> None:
        """Let a member be written into its part of the room: by the product that makes it, or once it is made."""
        with self._graph.inserting_before(after.next):
            target = self._graph.call_function(aten.narrow.default, part)
            target = self._graph.call_function(aten.view.default, (target, list(maker.meta["val"].shape)))
            if maker is member:
                self._graph.call_function(aten.copy_.default, (target, member))
                return
            product = self._graph.call_function(aten.mm.out, maker.args, {"out": target})
        maker.replace_all_uses_with(product)
        self._graph.erase_node(maker)


class _Gathering:
    """Tensors that are being gathered: each [ranks, n]."""

    def __init__(self, exchange: Exchange, members: Sequence[Tensor]) -> None:
        wholes = [whole_of(member, exchange) for member in members]
        self._wholes = wholes
        self._started = [exchange.all_gather(x) for x, whole in zip(members, wholes, strict=True) if whole is None]

    def wait(self) -> list[Tensor]:
        """Return them."""
        gathered = iter([started.wait() for started in self._started])
        return [next(gathered) if whole is None else whole for whole in self._wholes]


def lay_out(piece: Tensor, exchange: Exchange) -> Tensor:
    """Return this rank's piece of a split tensor as a row of one tensor of all ranks. A collective.

    Args:
        piece: what this rank holds, of the same shape on every rank.
        exchange: how the ranks along the axis exchange.
    """
    whole = exchange.common(exchange.size * piece.numel(), piece.dtype).view(exchange.size, -1)
    return whole[exchange.rank].view(piece.shape).copy_(piece)


def whole_of(x: Tensor, exchange: Exchange) -> Tensor | None:
    """Return the tensor of which x: [n] is this rank's row, if `lay_out` made it and nobody has replaced it since."""
    size = x.numel()
    in_place = x.untyped_storage().nbytes() == exchange.size * x.nbytes and x.storage_offset() == exchange.rank * size
    if not in_place or not x.is_contiguous() or not exchange.is_common(x):
        return None
    return x.as_strided((exchange.size, size), (size, 1), 0)


def copied_members(node: Node) -> list[Node] | None:
    """Return what ranks that share memory copy where a graph puts a bucket together; None if a node does not.

    What products make is written into its place, and what is gathered is gathered one by one.
    """
    if node.target is not aten.cat.default or len(node.users) != 1:
        return None
    match next(iter(node.users)).target:
        case collectives.all_reduce_in_place | collectives.reduce_scatter:
            return [member for member in _members(node) if _product_behind(member) is None]
        case collectives.all_gather:
            return []
    return None


def _members(x: Node) -> list[Node]:
    """Return what a bucket is made of; a tensor that is no bucket is its own only member."""
    if x.target is aten.cat.default and len(x.users) == 1:
        members = x.args[0]
        assert isinstance(members, (list, tuple))
        return list(members)
    return [x]


def _is_held(x: Node) -> bool:
    """Whether it is a view of what exists before and after the graph runs."""
    while is_view(x) and len(x.all_input_nodes) == 1:
        x = x.all_input_nodes[0]
    return x.op == "placeholder"


def _product_behind(member: Node) -> Node | None:
    """Return the matrix product of which a member is a view, if nothing else sees it and its memory is in order."""
    maker = member
    while is_view(maker) and len(maker.all_input_nodes) == 1 and is_fresh(maker):
        maker = maker.all_input_nodes[0]
    if maker.target is aten.mm.default and is_fresh(maker) and _keeps_order(maker, member):
        return maker
    return None


def _keeps_order(maker: Node, member: Node) -> bool:
    """Whether the views between them leave the elements in order: permuted and permuted back, if at all."""
    views: list[Node] = []
    node = member
    while node is not maker:
        views.append(node)
        node = node.all_input_nodes[0]
    value = torch.empty(maker.meta["val"].shape, device="meta")
    for node in reversed(views):
        if node.target in (aten.reshape.default, aten.view.default) and not value.is_contiguous():
            return False
        value = node.target(value, *node.args[1:], **node.kwargs)  # type: ignore[operator]  # an operator, as a view is
    return value.is_contiguous() and value.numel() == maker.meta["val"].numel()
