"""What the ranks of a benchmark do: take step times in turn, take a start, take peak memory.

Each job is started by `runtime.job.launch` and leaves what it found in a file of its rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from paceline.bench.contestants import OURS, Contender, Contestant, backend_of, mean_over_ranks, set_up
from paceline.bench.groups import Groups
from paceline.bench.memory import forget_peak, give_back, memory_bytes, peak_bytes
from paceline.bench.results import leave
from paceline.bench.workloads import Model, Scale, Workload, workload
from paceline.runtime.job.rendezvous import join
from paceline.runtime.job.world import STORE_FILE, World

_MEMORY_STEPS = 2


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
    """All contestants in one process per rank, turn by turn, so that a noisy machine is equally noisy for all."""
    job = Job.from_json(arguments)
    with join(backend=job.backend) as world:
        torch.set_num_threads(1)
        groups = Groups()
        with Progress(console=Console(stderr=True), disable=world.rank > 0) as progress:
            task = progress.add_task(job.title, total=len(job.contestants) * (job.rounds + 1))
            contenders: dict[Contestant, Contender] = {}
            losses: dict[str, float] = {}
            left_out: dict[str, str] = {}
            for who in job.contestants:
                try:
                    contender = set_up(who, job.workload, world, groups)
                    first_loss, _ = contender.step()
                    losses[who] = mean_over_ranks(first_loss)
                    contender.step()
                    contenders[who] = contender
                except Exception as error:
                    if who in OURS:
                        raise
                    # A peer that cannot run on this machine is told of, with its own words.
                    left_out[who] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                progress.advance(task)
            seconds: dict[str, list[float]] = {who: [] for who in contenders}
            optimizer: dict[str, list[float]] = {who: [] for who in contenders}
            names = list(contenders)
            for turn in range(job.rounds):
                first = turn % len(names)
                for who in names[first:] + names[:first]:
                    whole, of_optimizer = _turn(contenders[who], who, world, job.steps)
                    seconds[who].append(whole)
                    optimizer[who].append(of_optimizer)
                    progress.advance(task)
                progress.advance(task, len(left_out))
        starts = {who: asdict(contender.startup) for who, contender in contenders.items() if contender.startup}
        leave(
            job.folder,
            world.rank,
            {
                "step_s": seconds,
                "optimizer_s": optimizer,
                "loss": losses,
                "left_out": left_out,
                "start": starts,
                "backend": {
                    who: backend_of(who, world.backend.name) for who in contenders if who is not Contestant.SERIAL
                },
                "words": world.backend.words,
            },
        )


def take_start(arguments: dict[str, Any]) -> None:
    """Ours alone, to see how long a start takes."""
    job = Job.from_json(arguments)
    with join(backend=job.backend) as world:
        torch.set_num_threads(1)
        contender = set_up(Contestant.OURS_DP, job.workload, world, Groups())
        assert contender.startup is not None
        leave(job.folder, world.rank, {"start": {Contestant.OURS_DP: asdict(contender.startup)}})


def take_memory(arguments: dict[str, Any]) -> None:
    """Each contestant in a process of its own, forked from one that has loaded all libraries."""
    job = Job.from_json(arguments)
    rank = int(os.environ["RANK"])
    workload(job.model, Scale.TINY).build()  # loads the model's library
    fork = multiprocessing.get_context("fork")
    taken: dict[str, dict[str, int]] = {}
    with Progress(console=Console(stderr=True), disable=rank > 0) as progress:
        for who in progress.track(job.contestants, description=job.title):
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=_memory_of, args=(job, who, sender), daemon=True)
            process.start()
            sender.close()
            try:
                taken[who] = receiver.recv()
            except EOFError:
                raise RuntimeError(f"{who} ended without a word; see the log") from None
            finally:
                process.join()
    leave(job.folder, rank, {"memory": taken})


def _memory_of(job: Job, who: Contestant, sender: Connection) -> None:
    os.environ[STORE_FILE] = str(Path(job.folder) / f"meet-{who}")
    # On no other backend than its own, whose memory would be there too.
    with join(backend=backend_of(who, job.backend)) as world:
        torch.set_num_threads(1)
        groups = Groups()
        # Libraries that load with the first step, and what they keep, are no memory of this model.
        if _takes_part(who, world):
            set_up(who, workload(job.model, Scale.TINY), world, groups).step()
        give_back()
        dist.barrier()  # a share of what all have depends on how many have it already
        before = memory_bytes()
        forget_peak()
        dist.barrier()
        contender = set_up(who, job.workload, world, groups) if _takes_part(who, world) else None
        at_start = peak_bytes()
        if contender is not None:
            contender.step()
            give_back()
        dist.barrier()
        forget_peak()
        for _ in range(_MEMORY_STEPS):
            if contender is not None:
                contender.step()
        dist.barrier()
        taken = {"step_bytes": peak_bytes() - before, "start_bytes": at_start - before}
        dist.barrier()
    sender.send(taken)


def _takes_part(who: Contestant, world: World) -> bool:
    return world.rank == 0 or who is not Contestant.SERIAL


def _turn(contender: Contender, who: Contestant, world: World, steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and how many of them the optimizer took, on this rank."""
    gc.collect()
    gc.disable()  # a collection of everybody's garbage in one's turn
    dist.barrier()
    began = time.perf_counter()
    of_optimizer = 0.0
    if _takes_part(who, world):
        for _ in range(steps):
            _, seconds = contender.step()
            of_optimizer += seconds
    whole = time.perf_counter() - began
    dist.barrier()
    gc.enable()
    return whole / steps, of_optimizer / steps
