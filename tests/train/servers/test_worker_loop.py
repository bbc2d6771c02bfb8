"""The loop of a worker, against shards in memory: equal to serial under bsp, and what the other modes promise."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Plan, parallelize
from paceline.exchange.interface import Deal, Order
from paceline.exchange.job import DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.rates import Rates
from paceline.train.data.source import ArraySource
from paceline.train.optim import rates_of
from paceline.train.servers.worker.averaging import LocalSteps
from paceline.train.servers.worker.replica import Replica
from paceline.train.servers.worker.reports import EvaluationReport, Listener, TaskReport
from paceline.train.servers.worker.samples import TaskSamples
from paceline.train.servers.worker.worker import Worker
from paceline.train.servers.worker.working_set import WorkingSet
from tests.train.servers.in_memory import Dealing, InMemory, Kept
from tests.train.servers.loops import (
    ADAM,
    BATCH,
    SAMPLES,
    Doubled,
    cosine,
    gap,
    job_for,
    loss_of,
    net,
    replica_of,
    samples,
    serial,
    source,
    trained,
)


@pytest.fixture(scope="module", autouse=True)
def traced_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("programs")))
        yield


class Words(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.table(ids).sum(1))[:, 0], y)


@pytest.mark.parametrize(
    ("workers", "rule", "optimizer", "scheduled"),
    [
        (2, ADAM, lambda module: torch.optim.Adam(module.parameters(), lr=0.02, weight_decay=0.1), True),
        (
            4,
            Rule("momentum", {"lr": 0.1}),
            lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
            False,
        ),
    ],
    ids=["adam on a schedule", "momentum"],
)
def test_bsp_equals_serial(
    workers: int, rule: Rule, optimizer: Callable[[nn.Module], torch.optim.Optimizer], scheduled: bool
) -> None:
    steps = 14  # over two epochs, each with a smaller last step
    job = job_for(net(), "bsp", workers, rule)
    if scheduled:
        peak = torch.optim.SGD(net().parameters(), lr=1.0)
        job = replace(job, rates=Rates.of(rates_of(peak, cosine(peak, steps), steps)))

    def make() -> tuple[Replica, TaskSamples]:
        read = samples(workers)
        return replica_of(job, read), read

    kept, dealing = trained(job, net(), make, workers, steps * workers)
    assert sorted(dealing.finished) == list(range(steps * workers))
    assert gap(kept.values(), serial(optimizer, steps, scheduled=scheduled)) < 1e-9


@pytest.mark.parametrize(("mesh", "pieces", "clip"), [("dp=2", 2, None), ("fsdp=2", 1, 0.3)])
def test_replicas_on_a_mesh_in_one_process(mesh: str, pieces: int, clip: float | None) -> None:
    job = job_for(net(), "bsp", pieces, ADAM)

    def make() -> tuple[Replica, TaskSamples]:
        read = samples(pieces, micro_batches=2, divisor=2)
        return replica_of(job, read, mesh, clip), read

    def adam(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(module.parameters(), lr=0.02, weight_decay=0.1)

    kept, _ = trained(job, net(), make, 2, 6 * pieces)
    assert gap(kept.values(), serial(adam, 6, clip or math.inf)) < 1e-9
    assert clip is None or gap(kept.values(), serial(adam, 6)) > 1e-5


def test_downpour_reads_and_pushes_as_often_as_it_says() -> None:
    job = job_for(net(), "downpour(4, 2)", 1, Rule("sgd", {"lr": 0.1}))
    read = samples(1)
    kept, dealing = Kept(job, dict(net().named_parameters())), Dealing(9)
    exchange = InMemory(kept, 0)
    Worker(exchange, dealing, replica_of(job, read), read.portions, ahead=6).run()
    assert exchange.pushes == [(0, 1), (2, 3), (4, 5), (6, 7), (8,)]
    assert exchange.pulls == 3
    module, accrued = net(), [torch.zeros_like(p) for p in net().parameters()]
    parameters = [p.detach().clone() for p in module.parameters()]
    for task in range(9):
        if task % 4 == 0:  # what it came to by its own steps makes way for what servers have
            with torch.no_grad():
                for mine, value in zip(module.parameters(), parameters, strict=True):
                    mine.copy_(value)
        (portion,) = read.portions(task)
        module.zero_grad()
        module(**portion.batch).backward()
        for mine, total in zip(module.parameters(), accrued, strict=True):
            total += mine.grad
            mine.data -= 0.1 * mine.grad
        if task % 2 == 1 or task == 8:
            for total, value in zip(accrued, parameters, strict=True):
                value -= 0.1 * total
                total.zero_()
    assert gap(kept.values(), dict(zip(kept.values(), parameters, strict=True))) < 1e-12


@pytest.mark.parametrize("consistency", ["asp", "ssp(1)", "downpour(2, 3)"])
def test_asynchronous_workers_learn_and_do_each_task_once(consistency: str) -> None:
    job = job_for(net(), consistency, 2, Rule("adagrad", {"lr": 0.3}))
    ahead = 2 if consistency.startswith("ssp") else 7

    def make() -> tuple[Replica, TaskSamples]:
        read = samples(2)
        return replica_of(job, read), read

    kept, dealing = trained(job, net(), make, 2, 60, ahead)
    assert sorted(dealing.finished) == list(range(60))
    whole = Doubled(source()).batch(torch.arange(SAMPLES).numpy())
    module = net()
    before = loss_of(module, whole)
    module.load_state_dict(kept.values())
    assert loss_of(module, whole) < 0.85 * before
    assert {shard.completed for shard in kept.shards} == {30}


class Noted(Listener):
    def __init__(self) -> None:
        self.tasks: list[TaskReport] = []
        self.evaluations: list[EvaluationReport] = []

    def on_task(self, report: TaskReport) -> None:
        self.tasks.append(report)

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)


def test_a_read_that_would_wait_for_a_lost_task_gives_way_to_it() -> None:
    """Worker 0 was dealt task 0 and died; worker 1 holds tasks of the next clock, which waits for it."""
    job = job_for(net(), "bsp", 2, Rule("sgd", {"lr": 0.1}))
    read, noted = samples(2), Noted()
    kept, dealing = Kept(job, dict(net().named_parameters())), Dealing(4)
    lost = dealing.next_task()
    exchange = InMemory(kept, 1, orphans=[0])

    class Orphaned:
        """Deals 1, 2 and, once asked in between, the lost task."""

        def __init__(self) -> None:
            self.deals = [*(Deal(Order.TASK, task) for task in (1, 2)), Deal(Order.TASK, lost.number, alone=True)]
            self.done_tasks: list[int] = []

        def next_task(self) -> Deal:
            return self.deals.pop(0) if self.deals else Deal(Order.END)

        def done(self, deals: Sequence[Deal]) -> None:
            self.done_tasks += [deal.number for deal in deals]

        def put_back(self, deals: Sequence[Deal]) -> None:
            raise AssertionError

    orphaned = Orphaned()
    Worker(exchange, orphaned, replica_of(job, read), read.portions, listener=noted).run()
    assert orphaned.done_tasks == [1, 0, 2]
    assert [(report.task, report.alone) for report in noted.tasks] == [(1, False), (0, True), (2, False)]
    assert all(shard.completed == 1 for shard in kept.shards)


def test_local_steps_are_averaged() -> None:
    """Two workers take three steps each on their halves of the batches; then their parameters are averaged."""
    every, rounds = 3, 3
    factors = [1.0, 1.0, 0.5, 0.5, 2.0, 0.3, 0.3, 0.2, 0.1]
    job = job_for(net(), "bsp", 2, Rule("sgd", {"lr": 1.0}))

    def make() -> tuple[LocalSteps, TaskSamples]:
        read = samples(2)
        replica = replica_of(job, read)
        optimizer = torch.optim.SGD(replica.module.parameters(), lr=0.1)
        return LocalSteps(replica, optimizer, every, read.portions, factors), read

    kept, _ = trained(job, net(), make, 2, 2 * rounds)
    read, values = samples(2), {name: p.detach() for name, p in net().named_parameters()}
    for clock in range(rounds):
        came_to, weights = [], []
        for piece in range(2):
            module, weight = net(), 0
            module.load_state_dict(values)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for step in range(clock * every, (clock + 1) * every):
                optimizer.param_groups[0]["lr"] = 0.1 * factors[step]
                for portion in read.portions(2 * step + piece):
                    optimizer.zero_grad()
                    module(**portion.batch).backward()
                    optimizer.step()
                    weight += portion.samples
            came_to.append(module.state_dict())
            weights.append(weight)
        values = {
            name: sum(state[name] * weight for state, weight in zip(came_to, weights, strict=True)) / sum(weights)
            for name in values
        }
    assert gap(kept.values(), values) < 1e-9


def test_evaluations_are_of_what_servers_have_and_change_nothing() -> None:
    job = job_for(net(), "bsp", 1, Rule("sgd", {"lr": 0.1}))
    read, noted = samples(1), Noted()
    kept, dealing = Kept(job, dict(net().named_parameters())), Dealing(6, evaluate=[3, 6])
    worker = Worker(
        InMemory(kept, 0),
        dealing,
        replica_of(job, read),
        read.portions,
        validation=lambda: read.portions(0),
        listener=noted,
    )
    worker.run()
    assert [report.clock for report in noted.evaluations] == [3, 6]
    module = net()
    for step, report in enumerate(noted.evaluations, start=1):
        module.load_state_dict(serial(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 3 * step))
        (portion,) = read.portions(0)
        assert report.loss == pytest.approx(loss_of(module, portion.batch), abs=1e-12)


def test_a_dense_and_a_sparse_table_equal_a_serial_module() -> None:
    """Rows that a batch does not name stay as they are, so plain gradient descent equals serial."""
    torch.manual_seed(2)
    whole = Words(50).double()
    random = torch.Generator().manual_seed(4)
    ids = torch.randint(50, (SAMPLES, 3), generator=random)
    y = torch.randn(SAMPLES, generator=random)
    data = Doubled(ArraySource({"ids": ids.numpy(), "y": y.numpy()}, "words"))
    rule = Rule("sgd", {"lr": 0.1})
    parameters = dict(whole.named_parameters())
    tables = tuple(
        SparseTable(name, 4, "float64", rule, initializer=Initializer("zeros"))
        if name == "table.weight"
        else DenseTable(name, tuple(p.shape), "float64", rule)
        for name, p in parameters.items()
    )
    job = Job(tables, shards=3, pieces=2)
    with torch.no_grad():
        whole.table.weight.zero_()

    def make() -> tuple[Replica, TaskSamples]:
        read = TaskSamples(data, BATCH, 2, seed=7)
        small = Words(1).double()
        small.head.load_state_dict(whole.head.state_dict())
        working_set = WorkingSet(small, {"table.weight": "ids"}, read.example())
        taken = working_set.take(read.example())
        module = parallelize(small, dict(taken.batch), Plan())
        return Replica(module, small, job, working_set=working_set), read

    kept, _ = trained(job, whole, make, 2, 14)
    module, read = copy.deepcopy(whole), TaskSamples(data, BATCH, 1, seed=7)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(7):
        (portion,) = read.portions(step)
        optimizer.zero_grad()
        module(**portion.batch).backward()
        optimizer.step()
    assert gap(kept.values(), dict(module.head.named_parameters(prefix="head"))) < 1e-9
    rows = torch.empty(50, 4, dtype=torch.float64)
    InMemory(kept, 9).pull_rows(0, torch.arange(50), rows, 0)
    assert float((rows - module.table.weight.detach()).abs().max()) < 1e-9
