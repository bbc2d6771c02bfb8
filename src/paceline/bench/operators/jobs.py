"""What the ranks of the operators benchmark do. Each leaves what it found in a file of its rank."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from paceline.bench.contestants import Contender
from paceline.bench.groups import Groups
from paceline.bench.operators.contestants import AXES, Contestant, backend_of, set_up
from paceline.bench.operators.workloads import Model, workload
from paceline.bench.results import leave
from paceline.bench.turns import take_memory as memory_of_each
from paceline.bench.turns import take_step_times as times_of_all
from paceline.bench.workloads import Scale, Workload
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


def take_step_times(arguments: dict[str, Any]) -> None:
    """All contestants in turn."""
    job = Job.from_json(arguments)
    with join(backend=job.backend) as world:
        torch.set_num_threads(1)
        found = times_of_all(
            job.contestants,
            partial(_set_up, workload(job.model, job.scale)),
            world,
            # A peer that cannot run on this machine is told of, with its own words.
            may_fail=lambda who: who not in AXES,
            rounds=job.rounds,
            steps=job.steps,
            title=job.title,
        )
        ran = [Contestant(who) for who in found["step_s"]]
        backends = {who: backend_of(who, world.backend.name) for who in ran if who is not Contestant.SERIAL}
        leave(job.folder, world.rank, {**found, "backend": backends, "words": world.backend.words})


def take_memory(arguments: dict[str, Any]) -> None:
    """The peak memory of each contestant."""
    job = Job.from_json(arguments)
    toy = workload(job.model, Scale.TINY)
    toy.build()  # loads the model's library
    taken = memory_of_each(
        job.contestants,
        partial(_set_up, workload(job.model, job.scale)),
        partial(_set_up, toy),
        backend=lambda who: backend_of(Contestant(who), job.backend),
        folder=job.folder,
        title=job.title,
    )
    leave(job.folder, int(os.environ["RANK"]), {"memory": taken})


def _set_up(made: Workload, who: str, world: World, groups: Groups) -> Contender:
    return set_up(Contestant(who), made, world, groups)
