"""Executors: they run a step's graphs for the ranks that live in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.graph import CodeGen

from paceline.placement.pieces import take
from paceline.placement.placements import Placement
from paceline.plan import Mesh
from paceline.runtime.binding import AxisGroup, bind
from paceline.runtime.shared import lay_out

c10d = torch.ops._c10d_functional
RankValues = list[list[Tensor]]
"""Values of each rank in this process."""


class Executor(Protocol):
    """Runs graphs for `ranks`, the ranks of the mesh that live in this process."""

    ranks: tuple[int, ...]

    def prepare(self, graph: Graph, constants: dict[str, Tensor]) -> Callable[[RankValues], RankValues]:
        """Return a function from each rank's inputs to each rank's outputs; it empties the lists that it is given."""
        ...

    def lay_out(self, piece: Tensor, axes: Sequence[str]) -> Tensor:
        """Return a rank's piece of a tensor split along `axes`, where it is gathered most easily. A collective."""
        ...

    def sum(self, values: Sequence[Tensor], axes: Sequence[str]) -> list[Tensor]:
        """Return, for each rank here, the sum of `values` over the ranks along the axes."""
        ...

    def gather(self, values: Sequence[Tensor], axis: str) -> list[list[Tensor]]:
        """Return, for each rank here, the values of all ranks along the axis, in their order."""
        ...


class ProcessExecutor:
    """One rank in this process; collectives run on `torch.distributed` (Gloo on CPUs, NCCL on GPUs)."""

    def __init__(self, rank: int, groups: dict[str, AxisGroup], *, mesh: Mesh, compile: bool = False) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self._groups = groups
        self._mesh = mesh
        self._compile = compile

    def prepare(self, graph: Graph, constants: dict[str, Tensor]) -> Callable[[RankValues], RankValues]:
        """Bind the collectives to process groups and generate code."""
        bound = bind(graph, constants, self._groups, functional=self._compile)
        if self._compile:
            compiled = torch.compile(GraphModule(*bound), fullgraph=True, dynamic=False)
            return lambda values: [list(compiled(*values[0]))]
        bound.graph.set_codegen(_FreeingCodeGen())
        forward = GraphModule(*bound).forward
        return lambda values: [list(forward(values[0]))]

    def lay_out(self, piece: Tensor, axes: Sequence[str]) -> Tensor:
        """Put it into memory that the ranks share, if they do."""
        exchange = self._groups[axes[0]].shared if len(axes) == 1 and not self._compile else None
        return piece if exchange is None or piece.device.type != "cpu" else lay_out(piece, exchange)

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


def local_piece(tensor: Tensor, placements: Sequence[Placement], where: Sequence[tuple[int, int]]) -> Tensor:
    """Cut a rank's piece of a global tensor; `where` gives (index, ranks) along each axis, outermost first."""
    for placement, (index, parts) in zip(placements, where, strict=True):
        tensor = take(tensor, placement, parts, index)
    return tensor
