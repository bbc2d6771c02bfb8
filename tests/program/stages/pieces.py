"""Pipelines of modules on micro-batches, next to the module itself on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.program.capture import Batch, as_call, capture, loss_of
from paceline.program.program import Program
from paceline.program.stages import Pipeline, cut
from tests.program.stages.serially import Ran, Stages
from tests.program.stepping import run_eagerly

EXACT = 1e-9
D = 6


def pieces(batch: Batch, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into micro-batches."""
    if isinstance(batch, dict):
        columns = {name: value.split(list(sizes)) for name, value in batch.items()}
        return [{name: column[i].contiguous() for name, column in columns.items()} for i in range(len(sizes))]
    rows = zip(*(value.split(list(sizes)) for value in batch), strict=True)
    return [tuple(value.contiguous() for value in row) for row in rows]


def without_dropout(module: nn.Module) -> nn.Module:
    """Set every dropout to zero: masks of a batch and those of its pieces differ."""
    for part in module.modules():
        for name in ("p", "dropout", "dropout_p", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module


def in_double(module: nn.Module, batch: Batch) -> tuple[nn.Module, Any]:
    """Return both in float64."""
    return module.double().train(), torch.utils._pytree.tree_map_only(Tensor, _double, batch)


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def pipeline_of(module: nn.Module, batch: Batch, count: int, **options: Any) -> tuple[Program, Pipeline]:
    """Capture a module on a micro-batch and cut it."""
    program = capture(module, batch)
    return program, cut(program, count, **options)


def run(program: Program, pipeline: Pipeline, module: nn.Module, batches: Sequence[Any], **options: Any) -> Ran:
    """Run a pipeline; each micro-batch has its share of the whole."""
    sizes = [float(_count(module, batch)) for batch in batches]
    shares = [size / sum(sizes) for size in sizes]
    return Stages(pipeline, program, module).run(batches, shares, **options)


def _count(module: nn.Module, batch: Any) -> int:
    leaves: list[Tensor] = torch.utils._pytree.tree_leaves(batch)
    return leaves[0].shape[0]


def accumulated(module: nn.Module, batches: Sequence[Any], shares: Sequence[float]) -> Ran:
    """Gradient accumulation over micro-batches, as their user would write it."""
    module = copy.deepcopy(module)
    total = torch.zeros(())
    for batch, share in zip(batches, shares, strict=True):
        args, kwargs = as_call(batch)
        loss = loss_of(module(*args, **kwargs)) * share
        if loss.requires_grad:
            loss.backward()
        total = total + loss.detach()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return Ran(total, gradients, dict(module.named_buffers()))


def serial(module: nn.Module, batch: Batch) -> Ran:
    """The module itself on the whole batch."""
    result = run_eagerly(module, batch)
    return Ran(result.loss, result.gradients, result.buffers)


def assert_equal(found: Ran, expected: Ran, tolerance: float = EXACT) -> None:
    """Compare loss, gradients and buffers; errors of a gradient are relative to its largest element."""
    loss = max(tolerance, 1e-6) if expected.loss.dtype is torch.float32 else tolerance
    assert abs(float(found.loss) - float(expected.loss)) <= loss * max(1.0, abs(float(expected.loss)))
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(float(value.abs().max()) for value in expected.gradients.values()) if expected.gradients else 0.0
    for name, gradient in found.gradients.items():
        error = float((gradient - expected.gradients[name]).abs().max())
        assert error <= tolerance * max(float(expected.gradients[name].abs().max()), 1e-3 * largest), (name, error)
    for name, buffer in found.buffers.items():
        torch.testing.assert_close(buffer, expected.buffers[name], rtol=tolerance, atol=tolerance, msg=name)


def data(*shapes: tuple[int, ...], rows: int = 6) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, *shape, generator=generator, dtype=torch.float64) for shape in shapes or ((D,),))


def hold(module: nn.Module, batch: Any, count: int, tolerance: float = 1e-9, **options: Any) -> Pipeline:
    """Cut a module, check both kinds of backward pass against the whole batch, and return the pipeline."""
    module, batch = in_double(module, batch)
    batches = pieces(batch, [2, 2, 2])
    program = capture(module, batches[0])
    pipeline = cut(program, count, split_backward=True, **options)
    for split in (False, True):
        assert_equal(run(program, pipeline, module, batches, split=split), serial(module, batch), tolerance)
    return pipeline


def tower(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(D, D) for _ in range(layers)))
