"""What the ranks of the pipelines benchmark do. Each leaves what it found in a file of its rank."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from paceline.bench.pipelines.contestants import Contestant, Cut, Schedule, Setting, Side, backend_of, set_up
from paceline.bench.pipelines.watch import watch
from paceline.bench.results import leave
from paceline.bench.turns import SERIAL
from paceline.bench.turns import take_memory as memory_of_each
from paceline.bench.turns import take_step_times as times_of_all
from paceline.bench.workloads import Scale
from paceline.runtime.job.rendezvous import join


@dataclass(frozen=True)
class Job:
    """What a rank is asked.

    Attributes:
        folder: where it leaves what it found.
        scale, ranks, cut: see `Setting`.
        names: of the contestants; ours come first.
        watched: schedules of ours that are observed when all turns are over.
        rounds: how often everybody has a turn.
        steps: steps of a turn.
        backend: of ours: `auto`, `shm` or `gloo`.
        title: of the progress bar.
    """

    folder: str
    scale: Scale
    ranks: int
    cut: Cut
    names: tuple[str, ...]
    watched: tuple[Schedule, ...]
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
        watched = tuple(map(Schedule, values["watched"]))
        scale, cut = Scale(values["scale"]), Cut(values["cut"])
        return cls(**{**values, "names": tuple(values["names"]), "watched": watched, "scale": scale, "cut": cut})

    @property
    def setting(self) -> Setting:
        """What all contestants have in common."""
        return Setting(self.scale, self.ranks, self.cut)


def take_step_times(arguments: dict[str, Any]) -> None:
    """All contestants in turn, and then what ranks of ours are seen to do."""
    job = Job.from_json(arguments)
    with join(backend=job.backend) as world:
        torch.set_num_threads(1)
        found = times_of_all(
            job.names,
            partial(set_up, job.setting),
            world,
            # A peer that cannot run here is told of, with its own words.
            may_fail=lambda who: who != SERIAL and Contestant.named(who).side is Side.TORCH,
            rounds=job.rounds,
            steps=job.steps,
            title=job.title,
        )
        backends = {who: backend_of(who, world.backend.name) for who in found["step_s"] if who != SERIAL}
        seen = watch(job.setting, job.watched, job.rounds)
        leave(job.folder, world.rank, {**found, "seen": seen, "backend": backends, "words": world.backend.words})


def take_memory(arguments: dict[str, Any]) -> None:
    """The peak memory of each contestant."""
    job = Job.from_json(arguments)
    taken = memory_of_each(
        job.names,
        partial(set_up, job.setting),
        partial(set_up, replace(job.setting, scale=Scale.TINY)),
        backend=lambda who: backend_of(who, job.backend),
        folder=job.folder,
        title=job.title,
    )
    leave(job.folder, int(os.environ["RANK"]), {"memory": taken})
