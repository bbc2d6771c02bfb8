"""Modules placed by hand, with all ranks in this process: for placements that no solver needs to find."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import Graph

from paceline.placement.placements import REPLICATE, Placement, Shape
from paceline.plan import Mesh, Plan
from paceline.program.program import Input, InputRole
from paceline.runtime.module import PlacedModule
from paceline.runtime.peers import in_process
from paceline.runtime.planning import Planner, StepMaker
from paceline.runtime.state import LocalState
from paceline.runtime.step import PlacedInput, Step

Placements = Mapping[str, tuple[Placement, ...]]


def step_of(mesh: Mesh, role: InputRole, shapes: Mapping[str, Shape], placements: Placements) -> Step:
    """A step that does nothing, with inputs of one role; those that are not named are whole."""
    whole = (REPLICATE,) * len(mesh.axes)
    inputs = [PlacedInput(Input(role, name), shape, placements.get(name, whole)) for name, shape in shapes.items()]
    return Step(mesh, Graph(), None, tuple(inputs), (), (), {}, {}, None, ())


def place_by_hand(module: nn.Module, mesh: str, placements: Placements) -> PlacedModule:
    """The parameters of a module on the ranks of a mesh; it cannot be called."""
    parsed = Mesh.parse(mesh)
    plan, peers = Plan(parsed), in_process(parsed, [torch.device("cpu")])
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    planner = Planner(module, plan, peers, None, StepMaker(), lifted=False)
    step = step_of(parsed, InputRole.PARAMETER, shapes, placements)
    state = LocalState(module, step.inputs, step.aliases, parsed, peers, planner.hollow)
    return PlacedModule(plan, planner, peers, state)


def give_gradients(parallel: PlacedModule, whole: Mapping[str, Tensor]) -> None:
    """Set the gradient of every piece to its part of a whole one."""
    for shard in parallel.shards():
        shard.tensor.grad = torch.zeros_like(shard.tensor)
        for patch in shard.patches:
            shard.tensor.grad[patch.local.index] = whole[shard.name][patch.whole.index]
