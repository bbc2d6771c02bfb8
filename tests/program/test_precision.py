"""Lifting a program to float64: all of it, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Graph

from paceline.program.capture import capture
from paceline.program.precision import lift
from tests import models


def _dtypes(graph: Graph) -> set[torch.dtype]:
    values = [node.meta.get("val") for node in graph.nodes]
    flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return {tensor.dtype for tensor in flat if isinstance(tensor, Tensor) and tensor.is_floating_point()}


def test_a_program_that_computes_in_float32_whatever_its_type() -> None:
    module, batch = models.llama()
    program = capture(module.double(), batch)
    before = [(node.name, node.target, str(node.args), str(node.kwargs)) for node in program.graph.nodes]
    lifted = lift(program)
    assert _dtypes(program.graph) == {torch.float32, torch.float64}
    assert _dtypes(lifted.graph) == {torch.float64}
    assert [(node.name, node.target, str(node.args), str(node.kwargs)) for node in program.graph.nodes] == before
    assert [(node.name, node.target) for node in lifted.graph.nodes] == [row[:2] for row in before]
    assert (lifted.inputs, lifted.outputs, lifted.aliases) == (program.inputs, program.outputs, program.aliases)


class Creating(nn.Module):
    """Creates tensors with and without a type, casts down, and names a type in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("low", torch.ones(3, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(3) + torch.zeros(3, dtype=torch.float32) + torch.tensor([1.0, 2.0, 3.0])
        cast = (x * self.weight).to(torch.bfloat16)
        return (cast * noise * self.low).sum(dtype=torch.float32) + torch.arange(3).sum()


def test_creations_casts_constants_and_reductions() -> None:
    lifted = lift(capture(Creating(), (torch.ones(2, 3),)))
    assert _dtypes(lifted.graph) == {torch.float64}
    assert all(value.dtype == torch.float64 for value in lifted.constants.values())
