"""Where a plan first differs from the captured program: both are run, and compared tensor by tensor.

All ranks run in this process, in float64 whatever type the difference was seen in: there a wrong operator stands out
from rounding by many orders. What only real processes do wrong is not seen here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from paceline.placement.origins import ORIGINS, Origin
from paceline.placement.pieces import join
from paceline.placement.place import place
from paceline.placement.placements import REPLICATE
from paceline.plan import Mesh, Plan
from paceline.program.capture import Batch, batch_leaves
from paceline.program.precision import lift, lifted_tensor
from paceline.program.program import InputRole, Program, holder
from paceline.runtime.executor import local_piece
from paceline.runtime.inprocess import InProcessExecutor
from paceline.runtime.step import Step, schedule
from paceline.verify.compare import relative_gap
from paceline.verify.precision import Precision
from paceline.verify.serial import program_inputs
from paceline.verify.subject import SEED, named_tensors

aten = torch.ops.aten
_UNDEFINED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Operators whose result is whatever was in memory."""
_TOLERANCE = Precision.FLOAT64.parallel
_SENTINEL = 1e6
"""Beyond it, values are not computed but set, as masks are; they say nothing about the scale of the others."""


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor along the captured program that differs; all that it is computed from agrees.

    Attributes:
        node: its name in the captured program.
        operator: what makes it.
        module: path of the user's module that calls the operator; empty for the root.
        backward: whether it is part of the backward pass.
        redistributed: the ranks made it well, and it went wrong on the way to `placements`.
        placements: where its pieces are, per axis of the mesh.
        rel_error: largest error, relative to its largest value.
    """

    node: str
    operator: str
    module: str
    backward: bool
    redistributed: bool
    placements: tuple[tuple[str, str], ...]
    rel_error: float

    def __str__(self) -> str:
        where = f"in '{self.module}'" if self.module else "outside of any submodule"
        how = ", ".join(f"{placement} over {axis}" for axis, placement in self.placements)
        what = "the redistribution of" if self.redistributed else ""
        direction = "backward" if self.backward else "forward"
        return (
            f"{what} {self.operator} {where} ({direction} pass, node {self.node}), placed {how or 'on one rank'}: "
            f"relative error {self.rel_error:.1e}. Everything it is computed from agrees."
        ).strip()


def first_difference(program: Program, module: nn.Module, batch: Batch, plan: Plan) -> FirstDifference | None:
    """Return the first difference of a plan from a captured program, or None where there is none in one process.

    Args:
        program: as captured.
        module: whose tensors are read; not changed.
        batch: global.
        plan: how the program is placed and scheduled.
    """
    program = lift(program)
    tensors = {name: lifted_tensor(tensor.detach()) for name, tensor in named_tensors(module).items()}
    leaves = batch_leaves(pytree.tree_map_only(Tensor, lifted_tensor, batch))
    serial = _Serial(program)
    with torch.no_grad():
        torch.manual_seed(SEED)
        serial.run(*program_inputs(program, tensors, leaves), enable_io_processing=False)
        # Scheduling changes graphs in place, so the plan gets a copy of its own.
        step = schedule(place(lift(program), plan), plan)
        comparison = _Comparison(serial, plan.mesh)
        torch.manual_seed(SEED)
        _run(step, InProcessExecutor(plan.mesh, [torch.device("cpu")], comparison.observe), tensors, leaves)
    return comparison.first()


class _Serial(Interpreter):
    """Runs a captured program and keeps every tensor, and how much rounding to expect of each node.

    A sum whose terms cancel is as wrong as its terms are large, and so is what is computed from it.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(holder(program.constants), graph=program.graph)
        self.extra_traceback = False
        self.nodes = {node.name: node for node in program.graph.nodes}
        self.order = {name: position for position, name in enumerate(self.nodes)}
        self.values: dict[tuple[str, int], Tensor] = {}
        self._usual: dict[Node, float] = {}
        self._noise: dict[Node, float] = {}

    def run_node(self, node: Node) -> Any:
        """Run one node and keep its results."""
        value = super().run_node(node)
        if node.op != "output":
            results = value if isinstance(value, (list, tuple)) else [value]
            tensors = {index: tensor for index, tensor in enumerate(results) if isinstance(tensor, Tensor)}
            self.values.update({(node.name, index): tensor for index, tensor in tensors.items()})
            self._usual[node] = max(map(_usual, tensors.values()), default=0.0)
            self._noise[node] = self._noise_of(node)
        return value

    def _noise_of(self, node: Node) -> float:
        sources = node.all_input_nodes
        if node.target is operator.getitem:
            return self._noise[sources[0]]
        cancelled = _TOLERANCE.floor * max((self._usual[source] for source in sources), default=0.0)
        carried = [
            self._noise[source] * max([1.0, *(self._usual[other] for other in sources if other is not source)])
            for source in sources
            if self._noise[source] > self._usual[source]
        ]
        return max([cancelled, *carried])

    def error(self, origin: Origin, whole: Tensor) -> float:
        """Return the largest error of a tensor, relative to its usual values or to what it is computed from."""
        reference = self.values[origin.node, origin.index]
        scale = max(_usual(reference), self._noise[self.nodes[origin.node]])
        return relative_gap(whole, reference, scale)


class _Comparison:
    """Observes a placed program as it runs, and keeps what differs from the serial one."""

    def __init__(self, serial: _Serial, mesh: Mesh) -> None:
        self._serial = serial
        self._mesh = mesh
        self._agreed: set[tuple[str, int]] = set()
        self._found: dict[tuple[str, int], FirstDifference] = {}

    def observe(self, node: Node, values: list[Any]) -> None:
        """Compare the tensor that the ranks' values are pieces of."""
        origins: tuple[Origin, ...] = node.meta.get(ORIGINS, ())
        if len(origins) != 1 or not isinstance(values[0], Tensor):
            return
        (origin,) = origins
        if not origin.node:
            return
        key = (origin.node, origin.index)
        source = self._serial.nodes[origin.node]
        if key in self._found or source.target in _UNDEFINED:
            return
        error = max(self._serial.error(origin, whole) for whole in _whole(values, origin, self._mesh))
        if error <= _TOLERANCE.rel_error:
            self._agreed.add(key)
            return
        self._found[key] = FirstDifference(
            node=origin.node,
            operator=str(source.target) if source.op == "call_function" else f"{source.op} {source.target}",
            module=source.meta.get("module", ""),
            backward=bool(source.meta.get("backward")),
            redistributed=key in self._agreed,
            placements=tuple(zip(self._mesh.names, map(str, origin.placements), strict=True)),
            rel_error=error,
        )

    def first(self) -> FirstDifference | None:
        """Return the one that stands first in the captured program."""
        return min(self._found.values(), key=lambda found: self._serial.order[found.node], default=None)


def _whole(values: Sequence[Tensor], origin: Origin, mesh: Mesh) -> list[Tensor]:
    """Join pieces, innermost axis first; the whole tensor as each rank sees it, since replicas may differ."""
    found = list(values)
    for axis, placement in reversed(list(zip(mesh.names, origin.placements, strict=True))):
        if placement == REPLICATE:
            continue
        joined = list(found)
        for group in mesh.groups(axis):
            whole = join([found[rank] for rank in group], placement)
            for rank in group:
                joined[rank] = whole
        found = joined
    return found


def _run(step: Step, executor: InProcessExecutor, tensors: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> None:
    """Run both passes of a step on all ranks."""

    def inputs(rank: int) -> list[Tensor]:
        where = [(index, step.mesh[axis]) for axis, index in step.mesh.coordinate(rank).items()]
        return [
            local_piece(
                leaves[placed.item.name] if placed.item.role is InputRole.BATCH else tensors[placed.item.name],
                placed.placements,
                where,
            )
            for placed in step.inputs
        ]

    results = executor.prepare(step.forward, step.constants)([inputs(rank) for rank in executor.ranks])
    if step.backward is not None:
        saved = [[*values[len(step.outputs) :], torch.ones_like(values[0])] for values in results]
        executor.prepare(step.backward, step.constants)(saved)


def _usual(tensor: Tensor) -> float:
    """Return the largest magnitude of floating-point numbers that are no sentinels."""
    if not tensor.is_floating_point():
        return 0.0
    magnitude = tensor.abs()
    usual = magnitude[magnitude < _SENTINEL]
    return float(usual.max()) if usual.numel() else 0.0
