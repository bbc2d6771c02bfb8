"""Asynchronous schedules equal a serial replay of what they logged, bit by bit; anything else does not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.program.capture import capture
from paceline.runtime.module import parallelize
from paceline.runtime.pipeline.asynchronous import Log, Made
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.train.asynchronous import VersionLog
from paceline.verify.replay import Replay
from paceline.verify.run import verify
from paceline.verify.serial import Piece
from tests.ranks import ranks

WIDTH, SAMPLES = 8, 8
Built = tuple[nn.Module, tuple[Tensor, Tensor]]


class Tower(nn.Module):
    """Layers, dropout, a running mean, and a loss over the tokens that count."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.layers[0].weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.1, self.training)
        return F.cross_entropy(self.head(self.norm(x)), labels)


def build(tied: bool = False) -> Built:
    torch.manual_seed(0)
    labels = torch.randint(0, WIDTH, (SAMPLES,))
    labels[:2] = -100  # micro-batches count unequally
    return Tower(tied), (torch.randn(SAMPLES, WIDTH), labels)


@pytest.mark.parametrize(
    ("schedule", "mesh", "launch"),
    [
        ("pipedream", "pp=4", "inprocess"),
        ("pipedream-2bw", "pp=2", "inprocess"),
        ("pipedream-2bw", "dp=2,pp=2", "inprocess"),
        ("pipedream", "pp=2", "processes"),
    ],
)
def test_a_replay_is_equal_bit_by_bit(schedule: str, mesh: str, launch: str) -> None:
    """Where stages are split further, within the tolerance of the type."""
    flow = PipelinePlan(schedule=schedule, micro_batches=2 if "dp" in mesh else 4)
    factory = f"{__file__}:build" if launch == "processes" else build
    report = verify(factory, mesh, steps=3, launch=launch, pipeline=flow)
    assert report.equal and report.exact == ("dp" not in mesh), report.to_json()
    told = report.to_json()
    assert told["compared_with"] == "serial replay" and (told["tolerance"] == 0.0) == report.exact


@pytest.mark.parametrize("late", [0, 1])
def test_one_version_off_is_not_equal(late: int) -> None:
    module, batch = build()
    plan = Plan(Mesh.parse("pp=2"), pipeline=PipelinePlan(schedule="pipedream", micro_batches=1))
    net = parallelize(build()[0], batch, plan, devices=["cpu"])
    assert isinstance(net, PipelinedModule)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    portions = [[_Portion(batch)] for _ in range(5)]
    result = net.train_batches(portions, [[seed] for seed in range(5)], lambda _stage, _version: optimizer.step())
    log = [_shifted(made, late) for made in result.log]
    program = capture(module, batch)

    def optimizers(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    replayed = Replay(lambda _: program, module, net.trained_by_stage, log, optimizers).run(
        [Piece(batch, seed, 1.0) for seed in range(5)]
    )
    state = net.full_state_dict()
    equal = [torch.equal(state[name], value) for name, value in replayed.parameters.items()]
    assert all(equal) if late == 0 else not any(equal)


def test_a_log_that_cannot_be_is_refused() -> None:
    module, batch = build()
    program = capture(module, batch)
    stages = [[name for name, _ in module.named_parameters()]]
    log: Log = [Made(0, 0, 1, ((0, 1),))]
    replay = Replay(lambda _: program, module, stages, log, lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(PlanError, match=r"stage 0 read version 1 .* micro-batch 0, but .* no more than 0"):
        replay.run([Piece(batch, 0, 1.0)])


def test_parameters_of_several_stages_are_refused() -> None:
    flow = PipelinePlan(schedule="pipedream", micro_batches=2)
    with pytest.raises(PlanError, match=r"'layers\.0\.weight' is used by several stages.*its copies would part"):
        verify(build, "pp=2", arguments={"tied": True}, steps=1, launch="inprocess", pipeline=flow)


def test_a_call_has_no_gradient_to_hand_over() -> None:
    module, batch = build()
    plan = Plan(Mesh.parse("pp=2"), pipeline=PipelinePlan(schedule="pipedream-2bw", micro_batches=2))
    net = parallelize(module, batch, plan, devices=["cpu"])
    with pytest.raises(PlanError, match="call train_batches"):
        net(*batch)


@ranks(2)
def test_old_versions_are_kept_only_as_long_as_they_are_read(rank: int) -> None:
    module, batch = build()
    plan = Plan(Mesh.parse("pp=2"), pipeline=PipelinePlan(schedule="pipedream", micro_batches=1))
    net = parallelize(module, batch, plan)
    assert isinstance(net, PipelinedModule)
    before = {name: parameter.data_ptr() for name, parameter in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.train_batches([[_Portion(batch)]] * 6, [[0]] * 6, lambda _stage, _version: optimizer.step())
    moved = {name: parameter.data_ptr() != before[name] for name, parameter in net.named_parameters()}
    # The last stage has nothing in flight when it updates, so its weights change in place.
    assert all(moved.values()) if rank == 0 else not any(moved.values())


def test_the_log_of_a_run_is_a_line_for_each_update(tmp_path: Path) -> None:
    record = VersionLog(tmp_path / "versions" / "rank-0.jsonl")
    record(0, 2, [Made(0, 0, 1, ((0, 0), (1, 0)))])
    record(1, 2, [Made(0, 0, 1, ((0, 0), (1, 0)))])
    lines = [json.loads(line) for line in (tmp_path / "versions/rank-0.jsonl").read_text().splitlines()]
    assert lines[1] == {
        "after_step": 1,
        "micro_batches": 2,
        "rank": 0,
        "stage": 0,
        "version": 1,
        "read": [[0, 0], [1, 0]],
    }


class _Portion:
    """A micro-batch that is a batch."""

    whole = False

    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self.batch, self.samples = batch, SAMPLES


def _shifted(made: Made, late: int) -> Made:
    return made._replace(read=tuple((index, max(0, version - late)) for index, version in made.read))
