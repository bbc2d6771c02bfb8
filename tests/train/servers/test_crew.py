"""A replica on several processes: the leader exchanges, the others follow, and the sum is serial."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from paceline.exchange.job import DenseTable, Job, Rule
from paceline.plan import Mesh, Plan
from paceline.runtime.job.world import World
from paceline.runtime.module import parallelize
from paceline.train.data.source import DatasetSource
from paceline.train.servers.worker.crew import Leader, follow
from paceline.train.servers.worker.replica import Replica
from paceline.train.servers.worker.reports import EvaluationReport, Listener
from paceline.train.servers.worker.samples import TaskSamples
from paceline.train.servers.worker.worker import Worker
from tests.ranks import ranks
from tests.train.servers.in_memory import Dealing, InMemory, Kept
from tests.train.servers.toys import Net, Points

STEPS, BATCH, MICRO_BATCHES = 5, 8, 2
SPLIT = {"fsdp=2": 3, "pp=2": 4}
"""Parameters that not every rank has whole."""
JOB_RULE = Rule("momentum", {"lr": 0.1})


class Doubled(DatasetSource):
    def batch(self, indices):
        batch = super().batch(indices)
        return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def serial(points: Doubled, clip: float) -> nn.Module:
    torch.manual_seed(4)
    module = Net(16).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    read = TaskSamples(points, BATCH, 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        (portion,) = read.portions(step)
        module(**portion.batch).backward()
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return module


class Looks(Listener):
    def __init__(self) -> None:
        self.loss = 0.0

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.loss = report.loss


@ranks(mesh="fsdp=2")
def test_a_crew_computes_what_one_process_would(world, mesh: Mesh) -> None:
    _check(world, mesh)


@ranks(mesh="pp=2")
def test_a_crew_may_have_stages(world, mesh: Mesh) -> None:
    _check(world, mesh, clip=0.5)


def _check(world: World, mesh: Mesh, clip: float | None = None) -> None:
    """Train the crew of this rank, and compare it with one process."""
    points = Doubled(Points(36), "points")  # the last step of an epoch has four samples
    torch.manual_seed(4)
    user_module = Net(16).double()
    began: dict[str, Tensor] = {name: p.detach().clone() for name, p in user_module.named_parameters()}
    tables = tuple(DenseTable(name, tuple(p.shape), "float64", JOB_RULE) for name, p in began.items())
    job = Job(tables, shards=2)
    module = parallelize(user_module, TaskSamples(points, BATCH, 1, MICRO_BATCHES).example(), Plan(mesh))
    read = TaskSamples(points, BATCH, 1, MICRO_BATCHES, shard=module.input_shard, divisor=mesh.batch_parts)
    replica = Replica(module, user_module, job, clip=clip)
    assert len(replica.rooms) == (len(tables) if replica.leads else len(tables) - SPLIT[str(mesh)])

    def held_out():
        return read.portions(0)

    if world.rank:
        follow(replica, read.portions, held_out)
        return
    kept, looks, leader = Kept(job, began), Looks(), Leader(replica)
    dealing = Dealing(STEPS, evaluate=[STEPS])
    Worker(InMemory(kept, 1), dealing, leader, read.portions, validation=held_out, listener=looks).run()
    leader.end()
    expected = serial(points, clip or math.inf)
    gaps = [(kept.values()[name] - p.detach()).abs().max() for name, p in expected.named_parameters()]
    assert max(map(float, gaps)) < 1e-9
    (portion,) = TaskSamples(points, BATCH, 1).portions(0)
    with torch.no_grad():
        assert abs(looks.loss - float(expected(**portion.batch))) < 1e-12
