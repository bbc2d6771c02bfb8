"""The plan's side of a verification: trained by its ranks, every piece on every rank compared with the reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from paceline.plan import Plan
from paceline.program.capture import Batch, as_call
from paceline.program.program import Program
from paceline.runtime.job.rendezvous import join
from paceline.runtime.job.world import ONE_PROCESS, Backend
from paceline.runtime.module import ParallelModule, PlacedModule, parallelize, place_in_process
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.runtime.state import Shard
from paceline.verify import asynchronous
from paceline.verify.compare import Key, Kind, gap, largest_gap, loss_name
from paceline.verify.precision import Precision
from paceline.verify.steps import run_steps
from paceline.verify.subject import Subject, batches
from paceline.verify.traffic import Volume, pipeline_traffic, traffic

START, REFERENCE = "start.safetensors", "reference.safetensors"


@dataclass(frozen=True)
class Job:
    """What ranks are to do, and through which backend they talk.

    `directory` holds the two files START and REFERENCE, and takes what each process found.
    """

    subject: Subject
    plan: Plan
    steps: int
    rate: float
    losses: tuple[float, ...]
    directory: Path
    backend: str = "auto"

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads. The factory must be given by name."""
        subject = {**asdict(self.subject), "precision": self.subject.precision.value}
        rest = {"steps": self.steps, "rate": self.rate, "losses": list(self.losses), "backend": self.backend}
        return {"subject": subject, "plan": self.plan.to_dict(), "directory": str(self.directory), **rest}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Job:
        """Read what `to_json` returned."""
        subject = values["subject"]
        return cls(
            Subject(subject["factory"], subject["arguments"], Precision(subject["precision"])),
            Plan.from_dict(values["plan"]),
            values["steps"],
            values["rate"],
            tuple(values["losses"]),
            Path(values["directory"]),
            values["backend"],
        )


@dataclass(frozen=True)
class Finding:
    """What the ranks of one process found.

    Attributes:
        losses: one per step.
        gaps: largest absolute difference from the reference.
        forward, backward: collectives of a step, by kind.
        backend: what carried tensors between processes.
        unknown_operators: those without a rule, which every rank computes whole.
    """

    losses: tuple[float, ...]
    gaps: dict[Key, float]
    forward: dict[str, Volume]
    backward: dict[str, Volume]
    backend: Backend
    unknown_operators: tuple[str, ...]

    def save(self, file: Path) -> None:
        """Write it as JSON."""
        volumes = {
            name: {kind: asdict(volume) for kind, volume in found.items()}
            for name, found in (("forward", self.forward), ("backward", self.backward))
        }
        found = [[kind.value, name, gap] for (kind, name), gap in self.gaps.items()]
        rest = {"backend": asdict(self.backend), "unknown_operators": self.unknown_operators}
        values = {"losses": self.losses, "gaps": found, **volumes, **rest}
        file.write_text(json.dumps(values), encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Finding:
        """Read what `save` wrote."""
        values = json.loads(file.read_text(encoding="utf-8"))
        forward, backward = (
            {kind: Volume(**volume) for kind, volume in values[name].items()} for name in ("forward", "backward")
        )
        return cls(
            tuple(values["losses"]),
            {(Kind(kind), name): gap for kind, name, gap in values["gaps"]},
            forward,
            backward,
            Backend(**values["backend"]),
            tuple(values["unknown_operators"]),
        )


def run_rank(arguments: Mapping[str, Any]) -> None:
    """Be a rank under the launcher: find, and leave the finding in the job's directory."""
    job = Job.from_json(arguments)
    with join(backend=job.backend) as world:
        find(job, world.backend).save(finding_file(job, world.rank))


def finding_file(job: Job, rank: int) -> Path:
    """Return where a rank leaves its finding."""
    return job.directory / f"rank-{rank}.json"


def find(job: Job, backend: Backend) -> Finding:
    """Train by the plan as one of its ranks, and compare; a collective."""
    module, batch = job.subject.build(job.directory / START)
    precision = job.subject.precision
    lifted = precision is Precision.FLOAT64
    parallel = parallelize(module, batch, job.plan, autocast=precision.autocast, lifted=lifted)
    return _train(job, parallel, batch, backend)


def find_in_process(job: Job, program: Program) -> Finding:
    """Train by the plan with all ranks in this process, and compare.

    `program` was captured from the module, and is lifted where the comparison is in float64.
    """
    module, batch = job.subject.build(job.directory / START)
    if job.plan.mesh.stage_ranks > 1:  # micro-batches have programs of their own
        precision = job.subject.precision
        lifted = precision is Precision.FLOAT64
        here = parallelize(module, batch, job.plan, devices=["cpu"], autocast=precision.autocast, lifted=lifted)
        return _train(job, here, batch, ONE_PROCESS)
    return _train(job, place_in_process(program, module, batch, job.plan), batch, ONE_PROCESS)


def _train(job: Job, parallel: ParallelModule, batch: Batch, backend: Backend) -> Finding:
    if isinstance(parallel, PipelinedModule) and parallel.is_asynchronous:
        return _train_asynchronously(job, parallel, batch, backend)
    gaps: dict[Key, float] = {}

    def differentiate(batch: Batch, seed: int) -> float:
        parallel.seed(seed)
        args, kwargs = as_call(batch)
        loss: torch.Tensor = parallel(*args, **kwargs)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        return loss.item()

    def compare_gradients() -> None:
        _compare(parallel, {Kind.GRADIENT}, job.directory / REFERENCE, gaps)

    losses, _ = run_steps(
        differentiate,
        parallel.parameters(),
        batches(batch, job.steps),
        rate=job.rate,
        after_first=compare_gradients,
    )
    _compare(parallel, {Kind.PARAMETER, Kind.BUFFER}, job.directory / REFERENCE, gaps)
    for number, (loss, reference) in enumerate(zip(losses, job.losses, strict=True)):
        gaps[Kind.LOSS, loss_name(number)] = gap(loss, reference)
    forward, backward, unknown = _communicated(parallel, batch)
    return Finding(tuple(losses), gaps, forward, backward, backend, unknown)


def _train_asynchronously(job: Job, parallel: PipelinedModule, batch: Batch, backend: Backend) -> Finding:
    """Train, and leave in the job's directory what a replay needs."""
    found = list(batches(batch, job.steps))
    trained = asynchronous.train(parallel, found, job.rate, job.directory / asynchronous.FINAL)
    trained.save(trained_file(job, parallel.ranks[0]))
    forward, backward, unknown = _communicated(parallel, batch)
    return Finding(trained.losses, {}, forward, backward, backend, unknown)


def trained_file(job: Job, rank: int) -> Path:
    """Return where the process of a rank leaves what it did under an asynchronous schedule."""
    return job.directory / f"trained-{rank}.json"


def _communicated(
    parallel: ParallelModule, batch: Batch
) -> tuple[dict[str, Volume], dict[str, Volume], tuple[str, ...]]:
    """What the first rank here communicates in a step, by pass and kind; and the operators without a rule."""
    args, kwargs = as_call(batch)
    if isinstance(parallel, PipelinedModule):
        steps = parallel.steps(*args, **kwargs)
        return *pipeline_traffic(steps, parallel.here[0].stages), steps[0].unknown_operators
    assert isinstance(parallel, PlacedModule), "no fallback was asked for"
    step = parallel.step(*args, **kwargs)
    return traffic(step.forward), traffic(step.backward), step.unknown_operators


def _compare(parallel: ParallelModule, kinds: set[Kind], reference: Path, gaps: dict[Key, float]) -> None:
    """Note the largest difference of every piece of every rank here from that part of the reference."""
    with safe_open(reference, framework="pt") as saved:
        names = set(saved.keys())
        for shard in parallel.shards():
            for kind in kinds & ({Kind.PARAMETER, Kind.GRADIENT} if shard.is_parameter else {Kind.BUFFER}):
                value, key = _value(shard, kind), f"{kind.value}/{shard.name}"
                if value is None and key not in names:
                    continue
                value = torch.zeros_like(shard.tensor) if value is None else value
                whole = saved.get_tensor(key) if key in names else torch.zeros(shard.shape)
                found = [largest_gap(value[p.local.index], whole[p.whole.index]) for p in shard.patches]
                gaps[kind, shard.name] = max([gaps.get((kind, shard.name), 0.0), *found])


def _value(shard: Shard, kind: Kind) -> torch.Tensor | None:
    return shard.tensor.grad if kind is Kind.GRADIENT else shard.tensor.detach()
