"""Program and plan become a placed program: axis after axis, outermost first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.placement.calls import resolve
from paceline.placement.constraints import pinned
from paceline.placement.costs import Costs
from paceline.placement.dimensions import batch_size, dimensions
from paceline.placement.fitting import check_batch, check_dimensions
from paceline.placement.intents import intent_of
from paceline.placement.lowering import lower
from paceline.placement.options import options
from paceline.placement.origins import ORIGINS, origins_of
from paceline.placement.placements import REPLICATE, Placement, Shape, global_shape
from paceline.placement.problem import Problem
from paceline.placement.solver import solve
from paceline.plan import Axis, Mesh, Plan, Recompute
from paceline.program.garbage import collection_held
from paceline.program.program import Input, Program
from paceline.program.rematerialize import recomputed


@dataclass(frozen=True)
class AxisReport:
    """What the solver did along one axis; costs are modelled seconds per step, `seconds` are those it took."""

    axis: str
    objective_s: float
    bound_s: float
    classes: int
    variables: int
    seconds: float


@dataclass
class PlacedProgram:
    """A program of local pieces with `redistribute` calls, the same for every rank of the mesh.

    Attributes:
        program: local shapes; inputs and outputs as in the captured program.
        mesh: the axes it was placed on.
        placements: for each input, its placement along each axis, outermost first.
        unknown_operators: operators without a rule, which every rank computes whole.
        reports: the solver's account, one per axis of several ranks.
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


@collection_held()
def place(
    program: Program,
    plan: Plan | Mesh,
    *,
    split_batch: bool = True,
    held: Mapping[Input, tuple[Placement, ...]] | None = None,
    costs: Costs | None = None,
) -> PlacedProgram:
    """Place a captured program on a mesh.

    Args:
        program: the global program.
        plan: its mesh's axes are solved one after the other, with the redistributions of the earlier ones in the graph.
            Its pins are what parameters must be, its memory is what a rank may hold, and what it computes again is
            marked.
        split_batch: False computes the whole batch on every rank, for one that is too small to divide.
        held: how ranks hold parameters and buffers already, along each axis; those of another program of the module.
        costs: of operators and redistributions; round figures by default.

    Raises:
        PlanError: a dimension of the batch does not divide; the message names sizes that do.
        PlacementError: no placement satisfies the plan.
    """
    plan = Plan(plan) if isinstance(plan, Mesh) else plan
    mesh = plan.mesh
    if program.training and plan.recompute is not Recompute.NONE:
        program = recomputed(program, plan.recompute)
    if split_batch:
        check_batch(batch_size(program), mesh)
    meanings = dimensions(program)
    nodes = dict(zip(program.inputs, program.placeholders, strict=True))
    check_dimensions({item: tuple(nodes[item].meta["val"].shape) for item in meanings}, meanings, mesh)
    fixed = pinned(program, plan.pins, mesh.names)
    for position, axis in enumerate(mesh.names):
        fixed[axis] |= {item: along[position] for item, along in (held or {}).items()}
    costs = costs or Costs.default()
    placements: dict[Input, tuple[Placement, ...]] = {item: () for item in program.inputs}
    reports, unknown = [], set()
    later = mesh.size
    for axis, parts in mesh.axes:
        if parts == 1:
            program = _on_one_rank(program)
            placements = {item: (*along, REPLICATE) for item, along in placements.items()}
            continue
        began = time.perf_counter()
        later //= parts
        problem = Problem(program, axis, parts, meanings)
        intent = intent_of(Axis(axis), split_batch=split_batch, saves_memory=plan.memory_bytes is not None)
        prices = costs.along(axis, parts)
        choices = options(problem, intent, prices, fixed[axis])
        memory = None if plan.memory_bytes is None else plan.memory_bytes * later
        solution = solve(problem, choices, prices, memory)
        unknown.update(problem.unknown_operators())
        program, along = lower(problem, solution, prices, regather=solution.regathers)
        placements = {item: (*placements[item], along[item]) for item in program.inputs}
        seconds = time.perf_counter() - began
        reports.append(
            AxisReport(axis, solution.objective_s, solution.bound_s, solution.classes, solution.variables, seconds)
        )
    return PlacedProgram(program, mesh, placements, tuple(sorted(unknown)), tuple(reports))


def _on_one_rank(program: Program) -> Program:
    """Return the program along an axis of one rank, where all is whole and nothing moves, whatever the axis is for."""
    program = program.copy()
    for node in program.graph.nodes:
        ref = resolve(node)
        if ref.node is not node:
            node.meta[ORIGINS] = (origins_of(ref.node)[ref.index],)
        elif node.op != "output":
            node.meta[ORIGINS] = tuple(origin.along(REPLICATE) for origin in origins_of(node))
    return program
