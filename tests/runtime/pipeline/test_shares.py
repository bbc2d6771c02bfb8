"""What micro-batches count by: known beforehand, counted by their programs, equal by the user's word, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PlanError
from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.runtime.module import parallelize
from paceline.runtime.pipeline.shares import Shares


def steps(*weights: float | None, counts: bool = False) -> list[Any]:
    return [SimpleNamespace(weight=weight, counts=counts) for weight in weights]


def test_known_weights_are_fractions() -> None:
    shares = Shares(steps(3.0, 2.0, 2.0), equal=False)
    assert [shares.of(i, None) for i in range(3)] == [3 / 7, 2 / 7, 2 / 7]
    assert shares.weight(0, None) == 3.0


def test_counted_weights_are_the_counts() -> None:
    shares = Shares(steps(None, None, counts=True), equal=False)
    assert (shares.of(0, 5.0), shares.of(1, 0.0)) == (5.0, 0.0)
    assert shares.weight(1, 4.0) == 4.0


def test_equal_ones_ask_nobody() -> None:
    shares = Shares(steps(None, None), equal=True)
    assert [shares.of(i, None) for i in range(2)] == [0.5, 0.5]
    assert shares.weight(0, None) is None
    assert Shares(steps(None), equal=False).of(0, None) == 1.0


def test_what_nobody_knows_is_refused() -> None:
    with pytest.raises(PlanError, match=r"not a mean that Paceline can read.*train\.loss_weight: equal"):
        Shares(steps(None, 2.0), equal=False)


def test_shares_of_a_group_add_up_to_one() -> None:
    shares = Shares(steps(1.0, 3.0, 2.0, 2.0), equal=False, group=2)
    assert [shares.of(i, None) for i in range(4)] == [0.25, 0.75, 0.5, 0.5]


def test_a_batch_in_which_nothing_counts_has_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = (torch.randn(4, 4), torch.full((4,), -100))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layers(x), labels)

    plan = Plan(Mesh.parse("pp=2"), pipeline=PipelinePlan(micro_batches=2))
    net = parallelize(Net(), batch, plan, devices=["cpu"])
    loss = net(*batch)
    loss.backward()
    assert loss.isnan() and net.last_weight == 0
    assert all(parameter.grad is None for parameter in net.parameters())
