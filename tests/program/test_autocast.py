"""Autocast to bfloat16 is captured, in the module and around it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.program.capture import capture
from tests.program.stepping import assert_close, run_eagerly, run_program


class Mixed(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.inside else contextlib.nullcontext():
            y = self.layers(x)
        return F.mse_loss(y.float(), x)


@pytest.mark.parametrize("inside", [True, False], ids=["in the module", "around it"])
def test_autocast(inside: bool) -> None:
    module = Mixed(inside)
    batch = (torch.linspace(-1, 1, 24).view(6, 4),)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        expected = run_eagerly(module, batch)
    program = capture(module, batch, autocast=None if inside else torch.bfloat16)
    matmuls = [n for n in program.graph.nodes if n.target is torch.ops.aten.addmm.default]
    assert [n.meta["val"].dtype for n in matmuls] == [torch.bfloat16] * 2
    found = run_program(program, module, batch)
    assert_close(found, expected, tolerance=1e-6)
    assert {g.dtype for g in found.gradients.values()} == {torch.float32}
