"""The step that runs: a placed program cut into a forward and a backward graph with its collectives in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph

from paceline.placement.place import PlacedProgram
from paceline.placement.placements import Placement, Shape
from paceline.plan import Mesh, Plan
from paceline.program.program import Input, InputRole, Output
from paceline.runtime.passes.communicate import communicate
from paceline.runtime.passes.partition import Partition, partition
from paceline.runtime.passes.recompute import recompute_in_backward, regather_parameters


@dataclass(frozen=True)
class PlacedInput:
    """An input of the step: its global shape and its placement along each mesh axis, outermost first."""

    item: Input
    shape: Shape
    placements: tuple[Placement, ...]


@dataclass
class Step:
    """What a rank runs; the same on every rank.

    Attributes:
        mesh: the axes whose names the collectives use.
        forward: reads `inputs`, returns `outputs` followed by values saved for the backward graph.
        backward: reads the saved values and the tangent, returns `gradients`; None in evaluation.
        inputs: parameters, buffers and batch, in the order in which the forward graph reads them.
        outputs: loss, weight where there is one, changed buffers.
        gradients: names of the parameters whose gradients are returned.
        constants: tensors that `get_attr` nodes read.
        aliases: further names of tied parameters and buffers.
        weight: the weight of the loss where it does not depend on the data; see `Program.weight`.
        unknown_operators: operators without a rule, computed whole on every rank.
    """

    mesh: Mesh
    forward: Graph
    backward: Graph | None
    inputs: tuple[PlacedInput, ...]
    outputs: tuple[Output, ...]
    gradients: tuple[str, ...]
    constants: dict[str, Tensor]
    aliases: dict[str, str]
    weight: float | None
    unknown_operators: tuple[str, ...]

    def input(self, role: InputRole, name: str) -> PlacedInput:
        """Return the input of that role and name."""
        return next(placed for placed in self.inputs if placed.item == Input(role, name))


def cut(placed: PlacedProgram, plan: Plan) -> Partition:
    """Return the two passes of a placed program, with its redistributions still in them. The program is used up."""
    if plan.zero_stage == 3:
        regather_parameters(placed.program)
    recompute_in_backward(placed.program.graph)
    return partition(placed.program)


def schedule(placed: PlacedProgram, plan: Plan) -> Step:
    """Cut a placed program into the two graphs that run, and put its collectives in order."""
    program = placed.program
    shapes = {item: placed.global_shape(item) for item in program.inputs}
    parts = cut(placed, plan)
    communicate(parts.forward, plan.bucket_bytes)
    if parts.backward is not None:
        communicate(parts.backward, plan.bucket_bytes)
    return Step(
        mesh=placed.mesh,
        forward=parts.forward,
        backward=parts.backward,
        inputs=tuple(PlacedInput(item, shapes[item], placed.placements[item]) for item in parts.forward_inputs),
        outputs=parts.forward_outputs,
        gradients=parts.gradients,
        constants=program.constants,
        aliases=program.aliases,
        weight=program.weight,
        unknown_operators=placed.unknown_operators,
    )
