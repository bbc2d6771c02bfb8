"""Binding: the communications of a graph become those of one rank's process groups.

Ranks that share memory exchange where tensors lie (`paceline.shm`). On Gloo exchanges among few ranks are direct
(`runtime.direct`). Everything else is a functional collective of `torch.distributed`, which is also what a graph to be
compiled consists of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph, Node

from paceline.placement.located import coordinate
from paceline.placement.placements import Shard
from paceline.placement.windows import window, window_sum
from paceline.runtime import collectives, direct
from paceline.runtime.kernels import embedding_dense_backward
from paceline.runtime.passes.views import is_view
from paceline.runtime.shared import MEMBERS, SharedBinding
from paceline.runtime.windows import WINDOW, Parcels, WindowBinding
from paceline.shm import Exchange

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
_LARGE_ROOM_BYTES = 4 << 20
"""Above this size each rank's part of an exchange is not padded to that of the largest."""


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along one axis that this rank talks to.

    Attributes:
        name: name of the process group, as functional collectives want it.
        index: where this rank stands along the axis.
        group: the process group; without it there are no direct exchanges.
    """

    name: str
    index: int
    group: dist.ProcessGroup | None = None

    @cached_property
    def shared(self) -> Exchange | None:
        """The exchanges through shared memory, where these ranks have it."""
        return None if self.group is None else Exchange.of(self.group)


class Bound(NamedTuple):
    """A graph that one rank can run, and the module that holds what it reads and calls."""

    root: nn.Module
    graph: Graph


def bind(graph: Graph, constants: dict[str, Tensor], groups: dict[str, AxisGroup], *, functional: bool) -> Bound:
    """Return what runs a graph as one rank, for which no code is generated yet.

    Args:
        graph: with the communications of `runtime.collectives`.
        constants: tensors that `get_attr` nodes read.
        groups: the process group along each axis.
        functional: use ATen operators and functional collectives only, which compilers understand.
    """
    binder = _Binder(graph, groups, functional=functional)
    for name, constant in constants.items():
        binder.root.register_buffer(name, constant, persistent=False)
    for node in list(binder.graph.nodes):
        if node.op == "call_function" and node.target in binder.bindings:
            with binder.graph.inserting_before(node):
                replacement = binder.bindings[node.target](node)
            replacement.meta.setdefault("val", node.meta["val"])  # the next one bound may read its shape
            node.replace_all_uses_with(replacement)
            _erase(node)
    return Bound(binder.root, binder.graph)


def _erase(node: Node) -> None:
    """Erase a communication, and the views and buckets that only it read."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for source in inputs:
        if not source.users and (is_view(source) or source.target is aten.cat.default):
            _erase(source)


class _Binder:
    """Replaces the communications of a copy of a graph."""

    def __init__(self, graph: Graph, groups: dict[str, AxisGroup], *, functional: bool) -> None:
        self.graph = Graph()
        self.graph.output(self.graph.graph_copy(graph, {}))
        self.root = nn.Module()
        self.bindings: dict[Any, Callable[[Node], Node]] = {
            collectives.all_reduce: self._all_reduce,
            collectives.all_reduce_in_place: self._all_reduce,
            collectives.all_reduce_max: self._all_reduce_max,
            collectives.reduce_scatter: self._reduce_scatter,
            collectives.all_gather: self._all_gather,
            collectives.all_to_all: self._all_to_all,
            collectives.wait: self._wait,
            collectives.take_piece: self._piece,
            collectives.take_term: self._term,
            coordinate: self._coordinate,
            window: self._window,
            window_sum: self._window,
        }
        if not functional:
            self.bindings[aten.embedding_dense_backward.default] = self._embedding_backward
        self._groups = groups
        self._functional = functional

    def _embedding_backward(self, node: Node) -> Node:
        return self._call(embedding_dense_backward, *node.args)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def _group(self, node: Node) -> AxisGroup:
        return self._groups[str(node.args[-2])]  # communications end with the name and the size of their axis

    def _shared(self, node: Node) -> Node | None:
        """Return the node as an exchange through shared memory where that is possible."""
        name, axis = str(node.args[-2]), self._group(node)
        if self._functional or node.meta["val"].device.type != "cpu" or axis.shared is None:
            return None
        return SharedBinding(self.graph, self.root, name, axis.shared).start(node)

    def _exchange(self, kind: type[direct.Exchange], node: Node) -> Node | None:
        """Return the node as a direct exchange where that is possible."""
        value, axis = node.meta["val"], self._group(node)
        if self._functional or axis.group is None or not direct.can_exchange(axis.group, value.device):
            return None
        name = f"{kind.__name__}_{node.args[-2]}"
        if not hasattr(self.root, name):
            self.root.add_module(name, kind(axis.group, axis.index))
        return self.graph.call_module(name, (node.args[0],))

    def _all_reduce(self, node: Node) -> Node:
        value = node.meta["val"]
        small = value.numel() * value.element_size() <= direct.SMALL_BYTES
        exchange = self._shared(node) or (self._exchange(direct.AllReduce, node) if small else None)
        if exchange is not None:
            return exchange
        reuse = node.target is collectives.all_reduce_in_place and not self._functional
        target = c10d.all_reduce_.default if reuse else c10d.all_reduce.default
        return self._call(target, node.args[0], "sum", self._group(node).name)

    def _all_reduce_max(self, node: Node) -> Node:
        return self._call(c10d.all_reduce.default, node.args[0], "max", self._group(node).name)

    def _reduce_scatter(self, node: Node) -> Node:
        exchange = self._shared(node) or self._exchange(direct.ReduceScatter, node)
        if exchange is not None:
            return exchange
        flat = self._call(aten.reshape.default, node.args[0], [-1])
        return self._call(c10d.reduce_scatter_tensor.default, flat, "sum", node.args[-1], self._group(node).name)

    def _all_gather(self, node: Node) -> Node:
        exchange = self._shared(node) or self._exchange(direct.AllGather, node)
        if exchange is not None:
            return exchange
        return self._call(c10d.all_gather_into_tensor.default, node.args[0], node.args[-1], self._group(node).name)

    def _all_to_all(self, node: Node) -> Node:
        exchange = self._shared(node)
        if exchange is not None:
            return exchange
        parts = node.args[-1]
        assert isinstance(parts, int)
        rows = [1] * parts
        return self._call(c10d.all_to_all_single.default, node.args[0], rows, rows, self._group(node).name)

    def _window(self, node: Node) -> Node:
        axis = self._group(node)
        written = WindowBinding(self.graph, node, axis.index)
        parcels = written.pack()
        started = self._shared_parcels(node, parcels)
        if started is not None:
            starts = [rank * parcels.most for rank in range(len(parcels.taken))]
        else:
            starts = [0, *accumulate(parcels.taken)][:-1]
            sizes = parcels.taken, parcels.given
            started = self._call(c10d.all_to_all_single.default, written.flat(parcels), *sizes, axis.name)
        started.meta[WINDOW] = partial(written.unpack, parcels=parcels, starts=starts)
        return started

    def _shared_parcels(self, node: Node, parcels: Parcels) -> Node | None:
        """Return the exchange for a window through shared memory, where that is possible."""
        name, axis, value = str(node.args[-2]), self._group(node), node.meta["val"]
        room = parcels.most * len(parcels.taken)
        if self._functional or value.device.type != "cpu" or axis.shared is None:
            return None
        if len(parcels.taken) > 2 and room * value.element_size() > _LARGE_ROOM_BYTES:
            return None
        return SharedBinding(self.graph, self.root, name, axis.shared).parcels(parcels, value.dtype)

    def _wait(self, node: Node) -> Node:
        started = node.args[0]
        assert isinstance(started, Node)
        is_object = started.op == "call_module"
        waited = (
            self.graph.call_method("wait", (started,)) if is_object else self._call(c10d.wait_tensor.default, started)
        )
        if WINDOW in started.meta:
            window_of: Callable[[Node], Node] = started.meta[WINDOW]
            return window_of(waited)
        if is_object:
            return self._take_apart(node, waited) if MEMBERS in started.meta else waited
        if started.target is c10d.all_gather_into_tensor.default:
            return self._call(aten.reshape.default, waited, [started.args[1], -1])
        return waited

    def _take_apart(self, node: Node, waited: Node) -> Node:
        """Let those who read the parts of a bucket read the members of a list instead."""
        for split in list(node.users):
            if split.target is aten.split_with_sizes.default:
                split.replace_all_uses_with(waited)
                self.graph.erase_node(split)
        return waited if not node.users else self._call(operator.getitem, waited, 0)

    def _piece(self, node: Node) -> Node:
        x, placement, _, parts = node.args
        assert isinstance(x, Node) and isinstance(placement, Shard) and isinstance(parts, int)
        if not isinstance(placement.blocks, int):
            return self._segments(node, x, placement.dim, placement.blocks, parts)
        shape = tuple(x.meta["val"].shape)
        outer = prod(shape[: placement.dim]) * placement.blocks
        rows = self._call(aten.reshape.default, x, [outer, parts, prod(shape) // (outer * parts)])
        mine = self._call(aten.select.int, rows, 1, self._group(node).index)
        piece = self._call(aten.reshape.default, mine, list(node.meta["val"].shape))
        # Kernels such as layer norm's backward silently assume contiguous pieces.
        return self._call(aten.clone.default, piece, memory_format=torch.contiguous_format)

    def _segments(self, node: Node, x: Node, dim: int, segments: tuple[int, ...], parts: int) -> Node:
        index, cuts, start = self._group(node).index, [], 0
        for size in segments:
            begin = start + size // parts * index
            cuts.append(self._call(aten.slice.Tensor, x, dim, begin, begin + size // parts))
            start += size
        return self._call(aten.cat.default, cuts, dim)

    def _coordinate(self, node: Node) -> Node:
        name = f"coordinate_{node.args[-2]}"
        if not hasattr(self.root, name):
            self.root.register_buffer(name, torch.tensor(self._group(node).index), persistent=False)
        return self.graph.get_attr(name)

    def _term(self, node: Node) -> Node:
        x = node.args[0]
        assert isinstance(x, Node)
        return x if self._group(node).index == 0 else self._call(aten.zeros_like.default, x)
