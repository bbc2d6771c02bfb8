"""Real steps and simulated ones call their parts alike."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.cluster.files import load
from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.planner.simulated import simulate
from paceline.trace import Category, from_chrome
from paceline.train.callbacks import StartReport, StepReport
from paceline.train.tracing import TraceFile


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.ones(8, 8), torch.zeros(8, 8)


def report(step: int) -> StepReport:
    return StepReport(step, 3, 0.0, 0.0, None, 1.0, 0.0, 0)


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_parts_have_the_names_that_a_simulation_gives_them(mesh: str, tmp_path: Path) -> None:
    plan = Plan(Mesh.parse(mesh), pipeline=PipelinePlan(micro_batches=4) if "pp" in mesh else PipelinePlan())
    module = paceline.parallelize(Network(), batch(), plan, devices=["cpu"])
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    trace = TraceFile(tmp_path / "rank-0.json", module, optimizer, [2])
    trace.on_start(StartReport(0, 3, 0))
    for step in (1, 2, 3):
        module(*batch()).backward()
        module.clip_grad_norm_(math.inf)
        optimizer.step()
        optimizer.zero_grad()
        trace.on_step(report(step))
    real = from_chrome(json.loads((tmp_path / "rank-0.json").read_text()))
    told = simulate(Network(), batch(), plan, cluster=load("laptop"))
    ranks = {0, 1} if "pp" in mesh else {0}
    parts = {(e.name, e.rank) for e in told.events if e.category is Category.PHASE and e.rank in ranks}
    # The norm and the update are called once for all ranks of this process.
    shared = {"gradients", "norm", "update"} if "pp" in mesh else set()
    assert {name for name, _ in parts} == {e.name for e in real}
    assert {p for p in parts if p[0] not in shared} == {(e.name, e.rank) for e in real if e.name not in shared}
    counted = [e.name for e in real]
    assert len(counted) == len(set(counted)), "only the one step that was asked for is noted"
