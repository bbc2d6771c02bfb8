"""Batch normalisation: taken apart during capture, with the statistics of the global batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.plan import Mesh, Plan
from paceline.runtime.module import parallelize
from tests.program.stepping import assert_close, capture_as_eager, run_eagerly, run_program

ours = torch.ops.paceline
SHAPES = {1: (6, 4), 2: (6, 4, 3, 5), 3: (6, 4, 2, 3, 2)}
KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.37, "eps": 1e-2},
    "not affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
}


class Model(nn.Module):
    def __init__(self, dims: int, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(1, 4, *[1] * (len(SHAPES[dims]) - 2), dtype=dtype))
        self.norm = KINDS[dims](4, **options).to(dtype)
        for name, tensor in self.norm.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + (0.5 if "var" in name or "weight" in name else 0.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x * self.scale)
        return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).tanh().mean()


def batch(dims: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return (torch.randn(SHAPES[dims], dtype=torch.float64) * 2 + 3).to(dtype)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dims", KINDS)
def test_equals_eager(dims: int, options: str, training: bool) -> None:
    model = Model(dims, OPTIONS[options]).train(training)
    if training:
        capture_as_eager(model, (batch(dims),))
    else:
        with torch.no_grad():
            capture_as_eager(model, (batch(dims),))


def test_frozen_in_a_module_that_trains() -> None:
    model = Model(2, {}).train()
    model.norm.eval()
    capture_as_eager(model, (batch(2),))


def test_one_dimension_of_time() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).tanh().mean()

    capture_as_eager(Model(), (torch.randn(4, 3, 7, dtype=torch.float64),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    model = Model(2, {}, torch.float32)
    if dtype is torch.bfloat16:  # the usual mixture: activations in bfloat16, statistics and parameters in float32
        model.scale.data = model.scale.data.bfloat16()
    capture_as_eager(model, (batch(2, dtype),), tolerance=1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=3", "dp=3,fsdp=2"])
@pytest.mark.parametrize("options", OPTIONS)
def test_statistics_are_those_of_the_global_batch(mesh: str, options: str) -> None:
    model = Model(2, OPTIONS[options])
    expected = run_eagerly(model, (batch(2),))
    parallel = parallelize(copy.deepcopy(model), (batch(2),), Plan(Mesh.parse(mesh)), devices=["cpu"])
    loss = parallel(batch(2))
    torch.testing.assert_close(loss, expected.loss, rtol=1e-12, atol=1e-12)
    state = parallel.full_state_dict()
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(state[name], buffer, rtol=1e-12, atol=1e-12)


def test_a_mean_far_from_zero_does_not_cancel() -> None:
    model = nn.BatchNorm2d(4)
    x = (batch(2) / 10 + 5000).float()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = model

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.norm(x).tanh(), x * 0)

    module = Loss()
    found = run_program(capture_as_eager(module, (x,), tolerance=1e-3), module, (x,))
    assert_close(found, run_eagerly(module, (x,)), tolerance=1e-3)


def test_sums_of_pieces_add_up() -> None:
    x, shift = batch(2).float(), torch.tensor([0.0, 1.0, -300.0, 2.5])
    whole = ours.batch_norm_sums(x, shift)
    assert whole.dtype is torch.float64
    torch.testing.assert_close(ours.batch_norm_sums(x[:2], shift) + ours.batch_norm_sums(x[2:], shift), whole)
    mean, variance, rstd = ours.batch_norm_statistics(whole, shift, 90, 1e-5)
    torch.testing.assert_close(mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(variance, x.var((0, 2, 3), correction=0))
    torch.testing.assert_close(rstd, (variance + 1e-5).rsqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_agree_with_their_shapes(dtype: torch.dtype) -> None:
    x, vector = batch(2).to(dtype), torch.rand(4, dtype=dtype)
    sums = torch.rand(2, 4, dtype=torch.float64)
    checks = ("test_schema", "test_faketensor")
    for operator, args in (
        (ours.batch_norm_sums, (x, vector)),
        (ours.batch_norm_statistics, (sums, vector, 90, 1e-5)),
        (ours.batch_norm_apply, (x, vector, vector, vector, None)),
        (ours.batch_norm_grad_sums, (x, x, vector, vector)),
        (ours.batch_norm_input_grad, (x, x, vector, vector, None, sums.to(dtype), 90)),
    ):
        torch.library.opcheck(operator.default, args, test_utils=checks)
