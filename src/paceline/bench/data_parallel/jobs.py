"""What the ranks of a benchmark do: take step times in turn, take a start, take peak memory.

Each job is started by `runtime.job.launch` and leaves what it found in a file of its rank.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from paceline.bench.contestants import OURS, Contender, Contestant, backend_of, set_up
from paceline.bench.groups import Groups
from paceline.bench.results import leave
from paceline.bench.turns import take_memory as memory_of_each
from paceline.bench.turns import take_step_times as times_of_all
from paceline.bench.workloads import Model, Scale, Workload, workload
from paceline.runtime.job.rendezvous import join
from paceline.runtime.job.world import World


@dataclass(frozen=True)
class Job:
    """What a rank is asked.

    Attributes:
        folder: where it leaves what it found.
        model: what is trained.
        scale: how large.
        contestants: who trains it; ours come first.
        rounds: how often everybody has a turn.
        steps: steps of a turn.
        backend: of ours: `auto`, `shm` or `gloo`.
        title: of the progress bar.
    """

    folder: str
    model: Model
    scale: Scale
    contestants: tuple[Contestant, ...]
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
        contestants = tuple(Contestant(name) for name in values["contestants"])
        model, scale = Model(values["model"]), Scale(values["scale"])
        return cls(**{**values, "model": model, "scale": scale, "contestants": contestants})

    @property
    def workload(self) -> Workload:
        """The model with its batch and optimizer."""
        return workload(self.model, self.scale)


def take_step_times(arguments: dict[str, Any]) -> None:
    """All contestants in turn."""
    job = Job.from_json(arguments)
    with join(backend=job.backend) as world:
        torch.set_num_threads(1)
        found = times_of_all(
            job.contestants,
            lambda who, world, groups: set_up(Contestant(who), job.workload, world, groups),
            world,
            # A peer that cannot run on this machine is told of, with its own words.
            may_fail=lambda who: Contestant(who) not in OURS,
            rounds=job.rounds,
            steps=job.steps,
            title=job.title,
        )
        ran = [Contestant(who) for who in found["step_s"]]
        backends = {who: backend_of(who, world.backend.name) for who in ran if who is not Contestant.SERIAL}
        leave(job.folder, world.rank, {**found, "backend": backends, "words": world.backend.words})


def take_start(arguments: dict[str, Any]) -> None:
    """Ours alone, to see how long a start takes."""
    job = Job.from_json(arguments)
    with join(backend=job.backend) as world:
        torch.set_num_threads(1)
        contender = set_up(Contestant.OURS_DP, job.workload, world, Groups())
        assert contender.startup is not None
        leave(job.folder, world.rank, {"start": {Contestant.OURS_DP: asdict(contender.startup)}})


def take_memory(arguments: dict[str, Any]) -> None:
    """The peak memory of each contestant."""
    job = Job.from_json(arguments)
    toy = workload(job.model, Scale.TINY)
    toy.build()  # loads the model's library

    def of(made: Workload, who: str, world: World, groups: Groups) -> Contender:
        return set_up(Contestant(who), made, world, groups)

    taken = memory_of_each(
        job.contestants,
        partial(of, job.workload),
        partial(of, toy),
        backend=lambda who: backend_of(Contestant(who), job.backend),
        folder=job.folder,
        title=job.title,
    )
    leave(job.folder, int(os.environ["RANK"]), {"memory": taken})
