"""Program and plan become a placed program: axis after axis, outermost first."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.placement.costs import Costs
from paceline.placement.intents import check_batch, intent_of
from paceline.placement.lowering import lower
from paceline.placement.options import options
from paceline.placement.placements import Placement, Shape, global_shape
from paceline.placement.problem import Problem
from paceline.placement.solver import solve
from paceline.plan import Axis, Mesh
from paceline.program.program import Input, InputRole, Program


@dataclass(frozen=True)
class AxisReport:
    """What the solver did along one axis; costs are modelled seconds per step."""

    axis: str
    objective_s: float
    bound_s: float
    classes: int
    variables: int


@dataclass
class PlacedProgram:
    """A program of local pieces with `redistribute` calls, the same for every rank of the mesh.

    Attributes:
        program: local shapes; inputs and outputs as in the captured program.
        mesh: the axes it was placed on.
        placements: for each input, its placement along each axis, outermost first.
        unknown_operators: operators without a rule, which every rank computes whole.
        reports: the solver's account, one per axis.
    """

    program: Program
    mesh: Mesh
    placements: dict[Input, tuple[Placement, ...]]
    unknown_operators: tuple[str, ...] = ()
    reports: tuple[AxisReport, ...] = ()

    def global_shape(self, item: Input) -> Shape:
        """Shape of an input before it was placed."""
        nodes = dict(zip(self.program.inputs, self.program.placeholders, strict=True))
        shape: Shape = tuple(nodes[item].meta["val"].shape)
        for axis, placement in reversed(list(zip(self.mesh.names, self.placements[item], strict=True))):
            shape = global_shape(shape, placement, self.mesh[axis])
        return shape


def batch_size(program: Program) -> int:
    """Size of the batch dimension: the first dimension of the first batch tensor that has one."""
    for item, node in zip(program.inputs, program.placeholders, strict=True):
        if item.role is InputRole.BATCH and node.meta["val"].ndim:
            return int(node.meta["val"].shape[0])
    return 1


def place(program: Program, mesh: Mesh, *, split_batch: bool = True) -> PlacedProgram:
    """Place a captured program on a mesh.

    Args:
        program: the global program.
        mesh: named axes; each is solved in turn, with the redistributions of the earlier ones in the graph.
        split_batch: False computes the whole batch on every rank, for one that is too small to divide.

    Raises:
        PlanError: the batch does not divide; the message names sizes that do.
        PlacementError: no placement satisfies the plan.
    """
    batch = batch_size(program)
    if split_batch:
        check_batch(batch, mesh)
    costs = Costs()
    placements: dict[Input, tuple[Placement, ...]] = {item: () for item in program.inputs}
    reports, unknown = [], set()
    for axis, parts in mesh.axes:
        problem = Problem(program, axis, parts)
        intent = intent_of(Axis(axis), split_batch=split_batch)
        solution = solve(problem, options(problem, intent, batch, costs), costs)
        unknown.update(problem.unknown_operators())
        program, along = lower(problem, solution, costs)
        placements = {item: (*placements[item], along[item]) for item in program.inputs}
        reports.append(AxisReport(axis, solution.objective_s, solution.bound_s, solution.classes, solution.variables))
        if split_batch:
            batch //= parts
    return PlacedProgram(program, mesh, placements, tuple(sorted(unknown)), tuple(reports))
