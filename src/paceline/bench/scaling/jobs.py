"""What the ranks of a scaling measurement do: the same batch divided among them, and a batch for each of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from paceline.bench.contestants import Contender, plain
from paceline.bench.groups import GLOO, Groups
from paceline.bench.results import leave
from paceline.bench.turns import take_step_times
from paceline.bench.workloads import Batch, Model, Scale, workload
from paceline.plan import Mesh, Plan
from paceline.runtime.job.rendezvous import join
from paceline.runtime.job.world import World
from paceline.runtime.module import parallelize


class Scaling(StrEnum):
    """What stays the same when ranks are added."""

    STRONG = "strong"
    """The batch."""
    WEAK = "weak"
    """The batch of each rank."""
    EAGER = "eager"
    """The unmodified module on one rank, to compare with."""


@dataclass(frozen=True)
class Job:
    """What a rank is asked.

    Attributes:
        folder: where it leaves what it found.
        scale: of the model.
        axis: of the mesh.
        batch: samples: of all ranks, and of each where the batch grows with them.
        rounds: how often everybody has a turn.
        steps: steps of a turn.
        backend: `auto`, `shm` or `gloo`.
        title: of the progress bar.
    """

    folder: str
    scale: Scale
    axis: str
    batch: int
    rounds: int
    steps: int
    backend: str
    title: str

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """Read what `to_json` wrote."""
        return cls(**{**values, "scale": Scale(values["scale"])})


def take_times(arguments: dict[str, Any]) -> None:
    """Steps of one batch and of one batch for each rank, in turn."""
    job = Job.from_json(arguments)
    with join(backend=job.backend) as world:
        torch.set_num_threads(1)
        if not dist.is_initialized():  # one rank has nobody to meet, but turns are taken between barriers
            dist.init_process_group(GLOO, store=HashStore(), rank=0, world_size=1)
        # alone, both are the same
        names = [Scaling.STRONG, Scaling.EAGER] if world.size == 1 else [Scaling.STRONG, Scaling.WEAK]
        found = take_step_times(
            names,
            lambda who, world, groups: set_up(Scaling(who), job, world, groups),
            world,
            may_fail=lambda who: False,
            rounds=job.rounds,
            steps=job.steps,
            title=job.title,
        )
        leave(job.folder, world.rank, {**found, "words": world.backend.words})


def set_up(who: Scaling, job: Job, world: World, groups: Groups) -> Contender:
    """Return the model ready to train on all ranks."""
    trained = workload(Model.GPT, job.scale)
    module, some = trained.build()
    samples = job.batch * (world.size if who is Scaling.WEAK else 1)
    batch = of_size(some, samples)
    if who is Scaling.EAGER:
        return plain(module, batch, trained)
    plan = Plan(Mesh(((job.axis, world.size),)))
    part = {name: value.chunk(world.size)[world.rank].contiguous() for name, value in batch.items()}
    ours = parallelize(module, batch, plan)
    return Contender(lambda: ours.local(**part), trained.optimizer(ours.parameters()), startup=ours.startups[0])


def of_size(batch: Batch, samples: int) -> Batch:
    """Return a batch of so many samples, those of another one again and again."""
    return {name: value[torch.arange(samples) % len(value)] for name, value in batch.items()}
