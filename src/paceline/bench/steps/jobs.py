"""What the ranks of `paceline bench steps` do: time calls and collectives, take steps in turn, and predict them.

Calls are timed between the turns of the steps that they predict: a machine that is slower today is so for both.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.optim import Optimizer

from paceline.bench.contestants import Contender
from paceline.bench.groups import Groups
from paceline.bench.results import leave
from paceline.bench.steps.foreign import now, others_since
from paceline.bench.steps.workloads import Model, workload_of
from paceline.bench.turns import take_memory as memory_of_each
from paceline.bench.workloads import Batch, Scale, Workload
from paceline.placement.costs import Costs
from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.runtime.exemplars import Exemplars
from paceline.runtime.figures import known_costs
from paceline.runtime.interface import ParallelModule
from paceline.runtime.job.rendezvous import join
from paceline.runtime.job.world import World
from paceline.runtime.link_times import MeasuredCollectives
from paceline.runtime.module import parallelize
from paceline.runtime.program_cache import default_directory
from paceline.simulator.placed.measured import collectives_of, graphs_of, peak_here, simulated, times_here
from paceline.simulator.placed.simulation import Simulation
from paceline.simulator.placed.step import Circumstances
from paceline.simulator.placed.workspace import MeasuredWorkspaces

_CPU = torch.device("cpu")
_FIRST_STEPS = 2
_CALL_ROUNDS = 2
"""So often all calls are timed between two turns of steps."""
PARTS = ("forward", "backward", "update")


@dataclass(frozen=True)
class Job:
    """What a rank is asked.

    Attributes:
        folder: where it leaves what it found.
        model: what is trained.
        scale: how large.
        meshes: on which meshes of as many ranks.
        micro_batches: of a pipeline.
        rounds: how often each mesh has a turn.
        steps: steps of a turn.
        backend: between ranks: `auto`, `shm` or `gloo`.
        title: of the progress bar.
    """

    folder: str
    model: Model
    scale: Scale
    meshes: tuple[str, ...]
    micro_batches: int
    rounds: int
    steps: int
    backend: str
    title: str

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Job:
        """Read what `to_json` wrote."""
        model, scale, meshes = Model(values["model"]), Scale(values["scale"]), tuple(values["meshes"])
        return cls(**{**values, "model": model, "scale": scale, "meshes": meshes})

    @property
    def workload(self) -> Workload:
        """The model with its batch and optimizer."""
        return workload_of(self.model, self.scale)


@dataclass(frozen=True)
class Trained:
    """A module on a mesh, with what trains it."""

    module: ParallelModule
    batch: Batch
    part: Batch
    optimizer: Optimizer

    def step(self) -> dict[str, float]:
        """Train one step as `paceline train` does; return the seconds of its parts."""
        began = time.perf_counter()
        loss = self.module.local(**self.part)
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        backward = time.perf_counter()
        self.module.clip_grad_norm_(math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        ended = time.perf_counter()
        return dict(zip(PARTS, (forward - began, backward - forward, ended - backward), strict=True))

    def private_bytes(self) -> int:
        """Return the bytes of the tensors between two steps that do not lie in memory which ranks share."""
        state = [x for kept in self.optimizer.state.values() for x in kept.values() if isinstance(x, Tensor)]
        tensors = [*self.module.parameters(), *self.module.buffers(), *state, *self.batch.values(), *self.part.values()]
        exchanges = [group.shared for group in self.module.peers.groups.values()]
        own = [x for x in tensors if not any(exchange and exchange.is_common(x) for exchange in exchanges)]
        return sum({x.data_ptr(): x.nbytes for x in own}.values())


def set_up(job: Job, workload: Workload, mesh: str) -> Trained:
    """Return a module on a mesh, ready to train; a collective."""
    module, batch = workload.build()
    pipeline = PipelinePlan(schedule="1f1b", micro_batches=job.micro_batches)
    ours = parallelize(module, batch, Plan(Mesh.parse(mesh), pipeline=pipeline))
    index, count = ours.input_shard
    part = {name: value.chunk(count)[index].contiguous() for name, value in batch.items()}
    return Trained(ours, batch, part, workload.optimizer(ours.parameters()))


def take_steps(arguments: dict[str, Any]) -> None:
    """Steps on all meshes in turn, and what they were predicted to take."""
    job = Job.from_json(arguments)
    with join(backend=job.backend) as world:
        torch.set_num_threads(1)
        given = Circumstances(
            optimizer=lambda module: job.workload.optimizer(module.parameters()), workspaces=MeasuredWorkspaces()
        )
        trained = {mesh: set_up(job, job.workload, mesh) for mesh in job.meshes}
        for each in trained.values():
            for _ in range(_FIRST_STEPS):
                each.step()
        graphs = {mesh: graphs_of(each.module, each.batch, given) for mesh, each in trained.items()}
        exemplars = Exemplars((graph for of_mesh in graphs.values() for graph in of_mesh), _CPU)
        rounds, collectives = _rounds(job, world, trained, exemplars)
        costs = known_costs(_CPU, default_directory())
        found: dict[str, Any] = {
            "rounds": rounds,
            "words": world.backend.words,
            "private_bytes": {mesh: each.private_bytes() for mesh, each in trained.items()},
        }
        if world.rank == 0:
            with _no_lines_of_the_profiler():
                found["predicted"] = {
                    mesh: _predicted(each, exemplars.seconds, collectives[mesh], costs, given)
                    for mesh, each in trained.items()
                }
            found["calls"] = {"timed": len(exemplars), "failed": sorted(exemplars.failed)}
        leave(job.folder, world.rank, found)


def take_memory(arguments: dict[str, Any]) -> None:
    """The peak memory of a step on each mesh."""
    job = Job.from_json(arguments)
    toy = workload_of(job.model, Scale.TINY)
    toy.build()  # loads the model's library

    def contender(made: Workload, who: str, world: World, groups: Groups) -> Contender:
        trained = set_up(job, made, who)
        return Contender(lambda: trained.module.local(**trained.part), trained.optimizer)

    taken = memory_of_each(
        job.meshes,
        partial(contender, job.workload),
        partial(contender, toy),
        backend=lambda who: job.backend,
        folder=job.folder,
        title=job.title,
    )
    leave(job.folder, int(os.environ["RANK"]), {"memory": taken})


@contextlib.contextmanager
def _no_lines_of_the_profiler() -> Iterator[None]:
    """Keep the terminal free of the two lines that PyTorch's profiler writes to it for each call that it weighs."""
    before = os.dup(2)
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


def _rounds(
    job: Job, world: World, trained: Mapping[str, Trained], exemplars: Exemplars
) -> tuple[dict[str, list[dict[str, float]]], dict[str, MeasuredCollectives]]:
    """Return by mesh what each of its turns took, and what its collectives take."""
    taken: dict[str, list[dict[str, float]]] = {mesh: [] for mesh in trained}
    with Progress(console=Console(stderr=True), disable=world.rank > 0) as progress:
        task = progress.add_task(job.title, total=job.rounds * (len(trained) + 1) + 2)
        _time_calls(exemplars, 1, counts=False)
        progress.advance(task)
        collectives = {mesh: collectives_of(each.module) for mesh, each in trained.items()}
        progress.advance(task)
        order = list(trained)
        for turn in range(job.rounds):
            _time_calls(exemplars, _CALL_ROUNDS)
            progress.advance(task)
            first = turn % len(order)
            for mesh in order[first:] + order[:first]:
                taken[mesh].append(_turn(trained[mesh], job.steps))
                progress.advance(task)
    return taken, collectives


def _time_calls(exemplars: Exemplars, rounds: int, *, counts: bool = True) -> None:
    gc.collect()
    for _ in range(rounds):
        if dist.is_initialized():
            dist.barrier()
        exemplars.round(counts=counts)


def _turn(trained: Trained, steps: int) -> dict[str, float]:
    """Return the medians of a turn's steps and their parts, and how many processors others had meanwhile."""
    gc.collect()
    gc.disable()
    if dist.is_initialized():
        dist.barrier()
    moment, parts, whole = now(), [], []
    for _ in range(steps):
        began = time.perf_counter()
        parts.append(trained.step())
        whole.append(time.perf_counter() - began)
    others = others_since(moment)
    gc.enable()
    return {"step": median(whole), **{part: median(each[part] for each in parts) for part in PARTS}, "others": others}


def _predicted(
    trained: Trained,
    seconds: Mapping[str, float],
    collectives: MeasuredCollectives,
    costs: Costs,
    given: Circumstances,
) -> dict[str, Any]:
    module = trained.module
    times = times_here(seconds, collectives, costs, module.peers)
    found = simulated(module, trained.batch, times, given)
    return told(found, peak_here(module, found, times))


def told(simulation: Simulation, peak: int) -> dict[str, Any]:
    """Return of a simulation what is compared; `peak` is in bytes."""
    most = max(simulation.ranks, key=lambda rank: rank.peak.bytes)
    return {
        "step_s": simulation.step_s,
        "phases": dict(simulation.phases),
        "exposed_s": dict(simulation.ranks[0].exposed_s),
        "handed_bytes": dict(simulation.ranks[0].handed_bytes),
        "peak_bytes": peak,
        "peak_parts": {part.value: count for part, count in most.peak.parts.items()},
        "peak_at": " ".join(filter(None, (most.peak.phase, most.peak.module, most.peak.operator))),
    }


def undisturbed(rounds: Sequence[Mapping[str, float]], limit: float, least: int) -> list[Mapping[str, float]]:
    """Return the turns in which others had little, or of all turns the `least` quietest."""
    quiet = [each for each in rounds if each["others"] <= limit]
    return quiet if len(quiet) >= least else sorted(rounds, key=lambda each: each["others"])[:least]
