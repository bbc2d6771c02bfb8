"""Workers, each in a thread, at the tasks of a small job in memory; and the same steps taken serially."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Plan, parallelize
from paceline.exchange.job import Consistency, DenseTable, Job, Rule
from paceline.plan import Mesh
from paceline.train.data.source import ArraySource
from paceline.train.optim import build_schedule
from paceline.train.servers.worker.computer import Computer
from paceline.train.servers.worker.replica import Replica
from paceline.train.servers.worker.samples import TaskSamples
from paceline.train.servers.worker.worker import Worker
from tests.train.servers.in_memory import Dealing, InMemory, Kept

SAMPLES, BATCH = 44, 8  # the sixth step of an epoch has four samples


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 10)
        self.outer = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.outer(torch.tanh(self.inner(x))), y)


def source() -> ArraySource:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 6, generator=random, dtype=torch.float64)
    y = torch.randint(3, (SAMPLES,), generator=random)
    made = ArraySource({"x": x.numpy(), "y": y.numpy()}, "test data")
    return made


class Doubled:
    """A source in float64."""

    def __init__(self, inner: ArraySource) -> None:
        self.inner, self.name, self.block = inner, inner.name, None

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, indices):
        batch = self.inner.batch(indices)
        return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def samples(pieces: int, micro_batches: int = 1, divisor: int = 1) -> TaskSamples:
    return TaskSamples(Doubled(source()), BATCH, pieces, micro_batches, seed=7, divisor=divisor)


def net() -> Net:
    torch.manual_seed(11)
    return Net().double()


def job_for(module: nn.Module, consistency: str, pieces: int, rule: Rule, **options: object) -> Job:
    tables = tuple(
        DenseTable(name, tuple(p.shape), "float64", rule, Consistency.parse(consistency))
        for name, p in module.named_parameters()
    )
    return Job(tables, shards=3, pieces=pieces, **options)


def replica_of(job: Job, read: TaskSamples, mesh: str = "serial", clip: float | None = None) -> Replica:
    user_module = net()
    devices = None if mesh == "serial" else [torch.device("cpu")]
    module = parallelize(user_module, read.example(), Plan(Mesh.parse(mesh)), devices=devices)
    return Replica(module, user_module, job, seed=5, clip=clip)


def trained(
    job: Job,
    module: nn.Module,
    make: Callable[[], tuple[Computer, TaskSamples]],
    workers: int,
    tasks: int,
    ahead: int = 2,
) -> tuple[Kept, Dealing]:
    """Let workers do all tasks, each in a thread."""
    kept, dealing = Kept(job, dict(module.named_parameters())), Dealing(tasks)
    made = [make() for _ in range(workers)]  # tracing is not for threads
    errors: list[BaseException] = []

    def work(number: int) -> None:
        replica, read = made[number]
        try:
            Worker(InMemory(kept, number), dealing, replica, read.portions, ahead=ahead).run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return kept, dealing


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return build_schedule(optimizer, "cosine", steps=steps, warmup=3, floor=0.1)


def serial(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    steps: int,
    clip: float = math.inf,
    *,
    scheduled: bool = False,
) -> dict[str, Tensor]:
    module = net()
    made, read = optimizer(module), samples(1)
    schedule = cosine(made, steps) if scheduled else None
    for step in range(steps):
        (portion,) = read.portions(step)
        made.zero_grad()
        module(**portion.batch).backward()
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        made.step()
        if schedule is not None:
            schedule.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def loss_of(module: nn.Module, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(module(**batch))


def gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - value.detach()).abs().max()) for name, value in expected.items())


ADAM = Rule("adam", {"lr": 0.02, "weight_decay": 0.1})
