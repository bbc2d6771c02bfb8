"""Programs that are placed on an inner mesh first, and cut afterwards."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.placement.pieces import take
from paceline.placement.place import PlacedProgram, place
from paceline.placement.placements import Partial, Shard
from paceline.plan import Mesh, Plan
from paceline.program.capture import batch_leaves, capture
from paceline.program.program import InputRole, Output, OutputRole, Program
from paceline.program.stages import Part, Pipeline, cut
from paceline.runtime.inprocess import InProcessExecutor
from paceline.runtime.passes.communicate import communicate
from paceline.runtime.passes.recompute import regather_parameters
from recipes import gpt as recipe
from tests.program.stages.pieces import in_double, serial
from tests.program.stages.serially import check

CPU = [torch.device("cpu")]


@cache
def captured() -> tuple[nn.Module, Any, Program]:
    torch.manual_seed(0)
    module, batch = in_double(*recipe.build(width=16, layers=3, heads=2, context=8, dropout=0.0, tied=True, batch=4))
    return module, batch, capture(module, batch)


class Placed:
    """A GPT on a mesh, cut, and run for one micro-batch by all ranks in one process."""

    def __init__(self, mesh: str, count: int, zero: int = 2, **options: Any) -> None:
        module, self.batch, program = captured()
        self.module = module
        self.mesh = Mesh.parse(mesh)
        self.placed: PlacedProgram = place(program.copy(), Plan(self.mesh))
        if zero == 3:
            regather_parameters(self.placed.program)
        self.pipeline: Pipeline = cut(self.placed.program, count, split_backward=True, **options)
        self.executor = InProcessExecutor(self.mesh, CPU)
        self.state: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def inputs(self) -> list[dict[str, Tensor]]:
        leaves, found = batch_leaves(self.batch), [dict[str, Tensor]() for _ in range(self.mesh.size)]
        for name, item in self.pipeline.inputs.items():
            if item.role is InputRole.TANGENT:
                value: Tensor = torch.ones((), dtype=torch.float64)
            else:
                value = (leaves if item.role is InputRole.BATCH else self.state)[item.name].detach()
            for rank, values in enumerate(found):
                values[name] = self.piece(value, self.placed.placements[item], rank)
        return found

    def piece(self, value: Tensor, placements: Any, rank: int) -> Tensor:
        for axis, placement in zip(self.mesh.names, placements, strict=True):
            index = self.mesh.coordinate(rank)[axis]
            if isinstance(placement, Shard):
                value = take(value, placement, self.mesh[axis], index)
            elif isinstance(placement, Partial) and index:
                value = torch.zeros_like(value)
        return value

    def part(self, part: Part, values: list[dict[str, Tensor]]) -> None:
        communicate(part.graph, 1 << 20)
        run = self.executor.prepare(part.graph, dict(self.placed.program.constants))
        for here, made in zip(values, run([[here[name] for name in part.inputs] for here in values]), strict=True):
            here.update(zip(part.outputs, made, strict=True))

    def run(self, split: bool) -> tuple[Tensor, dict[str, list[Tensor]]]:
        """Return the loss of rank 0, and the gradients of all ranks, added up over stages."""
        values = self.inputs()
        for stage in self.pipeline.stages:
            self.part(stage.forward, values)
        gradients: dict[str, list[Tensor]] = {}
        for stage in reversed(self.pipeline.stages):
            for part in (stage.backward_input, stage.backward_weight) if split else (stage.backward,):
                assert part is not None
                self.part(part, values)
            for name, value in stage.gradients.items():
                here = [of_rank[value] for of_rank in values]
                before = gradients.get(name)
                gradients[name] = here if before is None else [a + b for a, b in zip(before, here, strict=True)]
        return values[0][self.pipeline.stages[-1].outputs[Output(OutputRole.LOSS, "loss")]], gradients


MESHES = ["dp=2", "tp=2", "fsdp=2", "sp=2", "dp=2,tp=2"]


@pytest.mark.parametrize("mesh", MESHES)
def test_placed_programs_are_cut_and_equal_serial(mesh: str) -> None:
    placed = Placed(mesh, 2)
    check(placed.pipeline)
    expected = serial(placed.module, placed.batch)
    loss, gradients = placed.run(split=len(mesh) < 5)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-9, atol=1e-9)
    assert gradients.keys() == expected.gradients.keys()
    items = {item.name: item for item in placed.placed.program.inputs if item.role is InputRole.PARAMETER}
    for name, value in expected.gradients.items():
        for rank, gradient in enumerate(gradients[name]):
            piece = placed.piece(value, placed.placed.placements[items[name]], rank)
            torch.testing.assert_close(gradient, piece, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("mesh", ["tp=2", "fsdp=2"])
def test_calls_of_a_placed_program_keep_their_sequence(mesh: str) -> None:
    program = Placed(mesh, 1).placed.program
    heavy = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert all("sequence" in node.meta for node in calls)
    assert all(node.meta["sequence"] is not None for node in calls if node.target in heavy)
    redistributed = [n for n in calls if n.target.__name__ == "redistribute" and not n.meta["backward"]]
    assert any(node.meta["sequence"] is not None for node in redistributed)


def test_gathered_parameters_are_gathered_again_where_marked() -> None:
    def gathers(placed: Placed) -> list[int]:
        graphs = [stage.backward.graph for stage in placed.pipeline.stages if stage.backward is not None]
        found = [[n for n in graph.nodes if getattr(n.target, "__name__", "") == "redistribute"] for graph in graphs]
        return [sum(isinstance(n.args[1], Shard) and str(n.args[2]) == "R" for n in nodes) for nodes in found]

    kept, again = Placed("fsdp=2", 2), Placed("fsdp=2", 2, zero=3)
    assert gathers(kept) == [0, 0]
    assert min(gathers(again)) > 0
    assert sum(again.pipeline.saved_bytes) < sum(kept.pipeline.saved_bytes)
    assert not any(isinstance(module, nn.Dropout) and module.p for module in again.module.modules())


def test_stages_of_a_placed_program_read_few_values_of_others() -> None:
    pipeline = Placed("tp=2", 3, boundaries=["blocks.1", "blocks.2"]).pipeline
    assert {edge: len(names) for edge, names in pipeline.forward_edges.items()} == {(0, 1): 1, (1, 2): 1}
    assert {edge: len(names) for edge, names in pipeline.backward_edges.items()} == {(1, 0): 1, (2, 1): 1}
