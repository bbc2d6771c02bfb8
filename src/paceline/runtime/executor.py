"""Executors: they run a step's graphs for the ranks that live in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from paceline.placement.pieces import take
from paceline.placement.placements import Placement, Shard
from paceline.plan import Mesh
from paceline.runtime import collectives

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
RankValues = list[list[Tensor]]
"""Values of each rank in this process."""


class Executor(Protocol):
    """Runs graphs for `ranks`, the ranks of the mesh that live in this process."""

    ranks: tuple[int, ...]

    def prepare(self, graph: Graph, constants: dict[str, Tensor]) -> Callable[[RankValues], RankValues]:
        """Return a function from each rank's inputs to each rank's outputs; it empties the lists that it is given."""
        ...

    def sum(self, values: Sequence[Tensor], axes: Sequence[str]) -> list[Tensor]:
        """Return, for each rank here, the sum of `values` over the ranks along the axes."""
        ...

    def gather(self, values: Sequence[Tensor], axis: str) -> list[list[Tensor]]:
        """Return, for each rank here, the values of all ranks along the axis, in their order."""
        ...


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along one axis that this rank talks to.

    Attributes:
        name: name of the process group, as functional collectives want it.
        index: where this rank stands along the axis.
    """

    name: str
    index: int


class ProcessExecutor:
    """One rank in this process; collectives run on `torch.distributed` (Gloo on CPUs, NCCL on GPUs)."""

    def __init__(self, rank: int, groups: dict[str, AxisGroup], *, mesh: Mesh, compile: bool = False) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self._groups = groups
        self._mesh = mesh
        self._compile = compile

    def prepare(self, graph: Graph, constants: dict[str, Tensor]) -> Callable[[RankValues], RankValues]:
        """Bind the collectives to process groups and generate code."""
        module = bind(graph, constants, self._groups, in_place=not self._compile)
        if self._compile:
            compiled = torch.compile(module, fullgraph=True, dynamic=False)
            return lambda values: [list(compiled(*values[0]))]
        module.graph.set_codegen(_FreeingCodeGen())
        module.recompile()
        forward = module.forward
        return lambda values: [list(forward(values[0]))]

    def sum(self, values: Sequence[Tensor], axes: Sequence[str]) -> list[Tensor]:
        """All-reduce over each axis in turn."""
        (value,) = values
        for axis in axes:
            value = c10d.wait_tensor(c10d.all_reduce(value, "sum", self._groups[axis].name))
        return [value]

    def gather(self, values: Sequence[Tensor], axis: str) -> list[list[Tensor]]:
        """All-gather over the axis."""
        (value,) = values
        parts = self._mesh[axis]
        flat = value.contiguous().view(-1)
        gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(flat, parts, self._groups[axis].name))
        return [list(gathered.view(parts, *value.shape).unbind(0))]


class _FreeingCodeGen(CodeGen):
    """Generates `forward(values)`, which empties the list so that each value is freed after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        lines = [f"def {self._func_name}(self, values):"]
        if names:
            lines += [f"    {', '.join(names)}, = values", "    values.clear()"]
        return "\n".join(lines)


def bind(graph: Graph, constants: dict[str, Tensor], groups: dict[str, AxisGroup], *, in_place: bool) -> GraphModule:
    """Return a module of ATen operators and functional collectives only, for one rank."""
    bound = Graph()
    bound.output(bound.graph_copy(graph, {}))
    root = nn.Module()
    for name, constant in constants.items():
        root.register_buffer(name, constant, persistent=False)
    for node in list(bound.nodes):
        if node.op == "call_function" and node.target in _BINDINGS:
            with bound.inserting_before(node):
                replacement = _BINDINGS[node.target](bound, node, groups, in_place)
            replacement.meta.setdefault("val", node.meta["val"])  # the next one bound may read its shape
            node.replace_all_uses_with(replacement)
            bound.erase_node(node)
    return GraphModule(root, bound)


def _bind_all_reduce(graph: Graph, node: Node, groups: dict[str, AxisGroup], in_place: bool) -> Node:
    x, axis, _ = node.args
    reuse = in_place and node.target is collectives.all_reduce_in_place
    target = c10d.all_reduce_.default if reuse else c10d.all_reduce.default
    return graph.call_function(target, (x, "sum", groups[str(axis)].name))


def _bind_reduce_scatter(graph: Graph, node: Node, groups: dict[str, AxisGroup], _: bool) -> Node:
    x, axis, parts = node.args
    flat = graph.call_function(aten.reshape.default, (x, [-1]))
    return graph.call_function(c10d.reduce_scatter_tensor.default, (flat, "sum", parts, groups[str(axis)].name))


def _bind_all_gather(graph: Graph, node: Node, groups: dict[str, AxisGroup], _: bool) -> Node:
    x, axis, parts = node.args
    return graph.call_function(c10d.all_gather_into_tensor.default, (x, parts, groups[str(axis)].name))


def _bind_all_to_all(graph: Graph, node: Node, groups: dict[str, AxisGroup], _: bool) -> Node:
    x, axis, parts = node.args
    assert isinstance(parts, int)
    rows = [1] * parts
    return graph.call_function(c10d.all_to_all_single.default, (x, rows, rows, groups[str(axis)].name))


def _bind_wait(graph: Graph, node: Node, groups: dict[str, AxisGroup], _: bool) -> Node:
    started = node.args[0]
    assert isinstance(started, Node)
    waited = graph.call_function(c10d.wait_tensor.default, (started,))
    if started.target is c10d.all_gather_into_tensor.default:
        return graph.call_function(aten.reshape.default, (waited, [started.args[1], -1]))
    return waited


def _bind_piece(graph: Graph, node: Node, groups: dict[str, AxisGroup], _: bool) -> Node:
    x, placement, axis, parts = node.args
    assert isinstance(x, Node) and isinstance(placement, Shard) and isinstance(parts, int)
    shape = tuple(x.meta["val"].shape)
    outer = prod(shape[: placement.dim]) * placement.blocks
    rows = graph.call_function(aten.reshape.default, (x, [outer, parts, prod(shape) // (outer * parts)]))
    mine = graph.call_function(aten.select.int, (rows, 1, groups[str(axis)].index))
    piece = graph.call_function(aten.reshape.default, (mine, list(node.meta["val"].shape)))
    # Kernels such as layer norm's backward silently assume contiguous pieces.
    return graph.call_function(aten.clone.default, (piece,), {"memory_format": torch.contiguous_format})


def _bind_term(graph: Graph, node: Node, groups: dict[str, AxisGroup], _: bool) -> Node:
    x, axis, _parts = node.args
    if groups[str(axis)].index == 0:
        return x  # type: ignore[return-value]
    return graph.call_function(aten.zeros_like.default, (x,))


_BINDINGS: dict[Any, Callable[[Graph, Node, dict[str, AxisGroup], bool], Node]] = {
    collectives.all_reduce: _bind_all_reduce,
    collectives.all_reduce_in_place: _bind_all_reduce,
    collectives.reduce_scatter: _bind_reduce_scatter,
    collectives.all_gather: _bind_all_gather,
    collectives.all_to_all: _bind_all_to_all,
    collectives.wait: _bind_wait,
    collectives.take_piece: _bind_piece,
    collectives.take_term: _bind_term,
}


def local_piece(tensor: Tensor, placements: Sequence[Placement], where: Sequence[tuple[int, int]]) -> Tensor:
    """Cut a rank's piece of a global tensor; `where` gives (index, ranks) along each axis, outermost first."""
    for placement, (index, parts) in zip(placements, where, strict=True):
        tensor = take(tensor, placement, parts, index)
    return tensor
