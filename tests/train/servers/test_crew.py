"""A replica on several processes: the leader exchanges, the others follow, and the sum is serial."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from paceline.exchange.interface import Interrupted
from paceline.exchange.job import DenseTable, Job, Rule, SparseTable
from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.runtime.job.world import World
from paceline.runtime.module import parallelize
from paceline.train.data.order import Cut
from paceline.train.data.source import DatasetSource
from paceline.train.servers.worker.averaging import LocalSteps
from paceline.train.servers.worker.crew import Leader, follow
from paceline.train.servers.worker.replica import Replica, plain, some_of
from paceline.train.servers.worker.reports import EvaluationReport, Listener
from paceline.train.servers.worker.samples import TaskSamples
from paceline.train.servers.worker.worker import Worker
from paceline.train.servers.worker.working_set import WorkingSet
from tests.ranks import ranks
from tests.train.servers.in_memory import Dealing, InMemory, Kept
from tests.train.servers.toys import Clicks, Net, Points, Words

STEPS, BATCH = 5, 8
SPLIT = {"fsdp=2": 3, "pp=2": 4}
"""Dense parameters that not every rank has whole."""
MOMENTUM = Rule("momentum", {"lr": 0.1})


class Doubled(DatasetSource):
    def batch(self, indices):
        batch = super().batch(indices)
        return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


class Looks(Listener):
    def __init__(self) -> None:
        self.loss = 0.0

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.loss = report.loss


def net() -> Net:
    torch.manual_seed(4)
    return Net(16).double()


def serial(module: nn.Module, points: Doubled, clip: float = math.inf) -> nn.Module:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    read = TaskSamples(points, BATCH, 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        (portion,) = read.portions(step)
        module(**portion.batch).backward()
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return module


def tables_of(module: nn.Module, rule: Rule = MOMENTUM) -> tuple[DenseTable, ...]:
    return tuple(DenseTable(name, tuple(p.shape), "float64", rule) for name, p in module.named_parameters())


def gap(kept: Kept, expected: nn.Module) -> float:
    parameters = dict(expected.named_parameters())
    return max(float((value - parameters[name].detach()).abs().max()) for name, value in kept.values().items())


class Hesitant(InMemory):
    """Once, rows that are wanted at the end wait for a task whose worker is gone."""

    def __init__(self, kept: Kept, worker: int) -> None:
        super().__init__(kept, worker)
        self.gave_way = False

    def pull_rows(self, table: int, keys: Tensor, out: Tensor, clock: int) -> None:
        if clock == STEPS and not self.gave_way:
            self.gave_way = True
            raise Interrupted
        super().pull_rows(table, keys, out, clock)


def lead(kept: Kept, computer: Replica | LocalSteps, read: TaskSamples, tasks: int = STEPS) -> float:
    """Let a leader do tasks; return the loss of the first one's samples afterwards."""
    looks, leader = Looks(), Leader(computer)
    portions = read.portions if isinstance(computer, Replica) else (lambda task: ())
    dealing = Dealing(tasks, evaluate=[tasks])
    exchange = Hesitant(kept, 1)
    Worker(exchange, dealing, leader, portions, validation=lambda: read.portions(0), listener=looks).run()
    leader.end()
    assert exchange.gave_way == bool(computer.sparse)
    return looks.loss


@ranks(mesh="fsdp=2")
def test_a_crew_computes_what_one_process_would(world: World, mesh: Mesh) -> None:
    _check(world, mesh, averages=True)


@ranks(mesh="pp=2")
def test_a_crew_may_have_stages(world: World, mesh: Mesh) -> None:
    _check(world, mesh, clip=0.5)


def _check(world: World, mesh: Mesh, clip: float | None = None, *, averages: bool = False) -> None:
    """Train the crew of this rank, and compare it with one process."""
    points = Doubled(Points(36), "points")  # the last step of an epoch has four samples
    user_module = net()
    began: dict[str, Tensor] = {name: p.detach().clone() for name, p in user_module.named_parameters()}
    job = Job(tables_of(user_module), shards=2)
    pipeline = PipelinePlan(micro_batches=1, boundaries=("outer",) if "pp" in mesh.names else ())
    module = parallelize(user_module, TaskSamples(points, BATCH, 1, 2).example(), Plan(mesh, pipeline=pipeline))
    read = TaskSamples(points, BATCH, 1, 2, shard=module.input_shard, divisor=mesh.batch_parts)
    replica = Replica(module, user_module, job, clip=clip)
    assert len(replica.rooms) == len(job.tables) - (0 if replica.leads else SPLIT[str(mesh)])
    average = Job(tables_of(net(), Rule("sgd", {"lr": 1.0})), shards=2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    local = LocalSteps(Replica(module, user_module, average), optimizer, STEPS, read.portions)

    if world.rank:
        follow(replica, read.portions, lambda: read.portions(0))
        if averages:
            follow(local, lambda task: (), lambda: read.portions(0))
        return
    kept = Kept(job, began)
    loss = lead(kept, replica, read)
    expected = serial(net(), points, clip or math.inf)
    assert gap(kept, expected) < 1e-9
    (portion,) = TaskSamples(points, BATCH, 1).portions(0)
    with torch.no_grad():
        assert abs(loss - float(expected(**portion.batch))) < 1e-12
    if averages:
        kept = Kept(average, began)
        lead(kept, local, read, 1)
        assert gap(kept, expected) < 1e-9


@ranks(mesh="fsdp=2")
def test_a_crew_may_have_sparse_tables(world: World, mesh: Mesh) -> None:
    points = Doubled(Words(35), "words")  # the last step of an epoch has three samples, which two ranks do not divide
    torch.manual_seed(4)
    user_module = Clicks().double()
    expected = Clicks().double()
    expected.head.load_state_dict(user_module.head.state_dict())
    expected.words = nn.Embedding(2002, 4, _weight=torch.zeros(2002, 4, dtype=torch.float64))
    began = dict(expected.named_parameters())
    rule = Rule("sgd", {"lr": 0.1})
    job = Job((SparseTable("words.weight", 4, "float64", rule), *tables_of(expected, MOMENTUM)[1:]), shards=2)
    read = TaskSamples(points, BATCH, 1)
    kept = Kept(job, {name: p.detach().clone() for name, p in began.items()})
    working_set = WorkingSet(user_module, {"words.weight": "ids"}, read.example())
    example = some_of(plain(working_set.take(read.example()).batch), slice(BATCH // 2))
    module = parallelize(user_module, example, Plan(mesh))
    replica = Replica(module, user_module, job, working_set=working_set, cut=Cut(BATCH, BATCH, 2, 2))
    if world.rank:
        follow(replica, read.portions, lambda: read.portions(0))
        return
    loss = lead(kept, replica, read)
    optimizer = torch.optim.SGD(
        [{"params": expected.head.parameters(), "momentum": 0.9}, {"params": expected.words.parameters()}], lr=0.1
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        (portion,) = read.portions(step)
        expected(**portion.batch).backward()
        optimizer.step()
    assert gap(kept, expected) < 1e-9
    rows = torch.empty(2002, 4, dtype=torch.float64)
    InMemory(kept, 9).pull_rows(0, torch.arange(2002), rows, 0)
    assert float((rows - expected.words.weight.detach()).abs().max()) < 1e-9
    (portion,) = read.portions(0)
    with torch.no_grad():
        assert abs(loss - float(expected(**portion.batch))) < 1e-12
