"""Steps that are simulated on a described cluster are placed by its links, those of this machine by its own figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.cluster.files import load
from paceline.placement.costs import Costs
from paceline.placement.machine_of import machine_of
from paceline.plan import Mesh, Plan
from paceline.planner import simulated
from paceline.planner.simulated import simulate


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Costs]:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    costs: list[Costs] = []
    place = simulated.place

    def spying(*args: Any, **kwargs: Any) -> Any:
        costs.append(kwargs["costs"])
        return place(*args, **kwargs)

    monkeypatch.setattr(simulated, "place", spying)
    return costs


def test_the_solver_sees_the_cluster(seen: list[Costs]) -> None:
    plan = Plan(Mesh.parse("dp=2,tp=2"))
    for cluster in ("dgx-h100", None):
        simulate(Layer(), (torch.randn(4, 8),), plan, cluster=cluster)
    assert seen[0] == Costs.of_machine(machine_of(load("dgx-h100").of(4), plan.mesh))
    assert seen[1] == Costs.default()
