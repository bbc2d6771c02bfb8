"""A captured program run as it stands, next to the module itself run eagerly: what tests compare with."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.program.capture import Batch, as_call, batch_leaves, capture, loss_of
from paceline.program.program import InputRole, OutputRole, Program


@dataclass
class Result:
    """What a training step computes, under the user's names."""

    loss: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    weight: float | None = None


def run_program(program: Program, module: nn.Module, batch: Batch, seed: int = 0) -> Result:
    """Run the joint graph on the values of a module and a batch."""
    leaves = batch_leaves(batch)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = []
    for item in program.inputs:
        if item.role is InputRole.TANGENT:
            tangent = next(n for i, n in zip(program.inputs, program.placeholders, strict=True) if i is item)
            values.append(torch.ones((), dtype=tangent.meta["val"].dtype))
        else:
            values.append((leaves if item.role is InputRole.BATCH else state)[item.name].detach().clone())
    torch.manual_seed(seed)
    results = program.interpreter().run(*values, enable_io_processing=False)
    found = Result(results[0], weight=program.weight)
    for output, value in zip(program.outputs, results, strict=True):
        if output.role is OutputRole.GRADIENT:
            found.gradients[output.name] = value
        elif output.role is OutputRole.BUFFER:
            found.buffers[output.name] = value
        elif output.role is OutputRole.WEIGHT:
            found.weight = float(value)
    return found


def run_eagerly(module: nn.Module, batch: Batch, seed: int = 0) -> Result:
    """Run a copy of the module as its user would."""
    module = copy.deepcopy(module)
    args, kwargs = as_call(batch)
    torch.manual_seed(seed)
    loss = loss_of(module(*args, **kwargs))
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return Result(loss.detach(), gradients, dict(module.named_buffers()))


def assert_close(found: Result, expected: Result, tolerance: float = 1e-10) -> None:
    """Compare loss, every gradient, and every buffer that the program returns."""
    torch.testing.assert_close(found.loss, expected.loss, rtol=tolerance, atol=tolerance)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=tolerance, atol=tolerance, msg=name)
    for name, buffer in found.buffers.items():
        torch.testing.assert_close(buffer, expected.buffers[name], rtol=tolerance, atol=tolerance, msg=name)


def capture_as_eager(module: nn.Module, batch: Batch, *, tolerance: float = 1e-10, **options: Any) -> Program:
    """Capture, check that the program computes what the module does, and return it."""
    expected = run_eagerly(module, batch)
    program = capture(module, batch, **options)
    program.graph.lint()
    assert_close(run_program(program, module, batch), expected, tolerance)
    return program
