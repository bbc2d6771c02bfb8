"""Who trains in a pipeline: ours on each schedule, `torch.distributed.pipelining` on the same, and serial.

A control is ours without communication: the same stages on the same micro-batches, and nobody waits for anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from paceline.bench.contestants import Contender, plain
from paceline.bench.groups import GLOO, Groups
from paceline.bench.pipelines.control import Control
from paceline.bench.pipelines.pytorch import TorchPipeline
from paceline.bench.turns import SERIAL
from paceline.bench.workloads import GPT, VOCABULARY, Batch, Scale, Workload, adamw
from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.runtime.job.world import World
from paceline.runtime.module import parallelize
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.schedule import Kind

CHUNKS = 2
"""Stages per rank of the schedules that have several."""


class Schedule(StrEnum):
    """The synchronous schedules."""

    NAIVE = Kind.NAIVE.value
    GPIPE = Kind.GPIPE.value
    ONE_F_ONE_B = Kind.ONE_F_ONE_B.value
    INTERLEAVED = Kind.INTERLEAVED.value
    ZB_H1 = Kind.ZB_H1.value
    ZB_V = Kind.ZB_V.value

    @property
    def kind(self) -> Kind:
        """The kind of schedule."""
        return Kind(self.value)

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return CHUNKS if self in (Schedule.INTERLEAVED, Schedule.ZB_V) else 1

    @property
    def control(self) -> Schedule:
        """The schedule whose control computes what this one does: there, the order makes no difference."""
        return Schedule.ONE_F_ONE_B if self in (Schedule.NAIVE, Schedule.GPIPE) else self


class Side(StrEnum):
    """Whose implementation of a schedule."""

    OURS = "paceline"
    TORCH = "torch"
    CONTROL = "control"


@dataclass(frozen=True)
class Contestant:
    """A schedule as somebody implements it."""

    side: Side
    schedule: Schedule

    def __str__(self) -> str:
        """`torch-1f1b`."""
        return f"{self.side}-{self.schedule}"

    @classmethod
    def named(cls, name: str) -> Contestant:
        """Return the one of a name."""
        side, _, schedule = name.partition("-")
        return cls(Side(side), Schedule(schedule))


class Cut(StrEnum):
    """Where the stages of ours begin: where it finds best, or at the layers at which those of torch begin."""

    AUTO = "auto"
    LAYERS = "layers"


@dataclass(frozen=True)
class Setting:
    """What all contestants have in common.

    Attributes:
        scale: how large the model is.
        ranks: of the pipeline.
        cut: where the stages of ours begin.
    """

    scale: Scale
    ranks: int
    cut: Cut

    @property
    def micro_batches(self) -> int:
        """Of two samples each."""
        return 2 * self.ranks if self.scale is Scale.TINY else 8

    @property
    def layers(self) -> int:
        """As many as make all stages equal, also where ranks have several; of these, the least from 6 on."""
        stages = CHUNKS * self.ranks
        return stages if self.scale is Scale.TINY else -(-6 // stages) * stages

    @property
    def workload(self) -> Workload:
        """The model with its batch and optimizer."""
        layers, batch = self.layers, 2 * self.micro_batches
        width, heads, time = (32, 2, 16) if self.scale is Scale.TINY else (256, 8, 128)

        def build() -> tuple[GPT, Batch]:
            torch.manual_seed(0)
            tokens = torch.randint(VOCABULARY, (batch, time + 1))
            module = GPT(width, layers, heads, time)
            return module, {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

        title = (
            f"GPT, width {width}, {layers} layers, {time} tokens, batch {batch} in {self.micro_batches} micro-batches, "
            "AdamW"
        )
        return Workload(title, build, lambda module: list(module.get_submodule("blocks").children()), adamw)

    def plan(self, schedule: Schedule) -> Plan:
        """Return the plan of ours for a schedule."""
        stages = schedule.chunks * self.ranks
        boundaries = tuple(f"blocks.{stage * self.layers // stages}" for stage in range(1, stages))
        pipeline = PipelinePlan(
            schedule=schedule,
            micro_batches=self.micro_batches,
            chunks=schedule.chunks,
            boundaries=boundaries if self.cut is Cut.LAYERS else (),
        )
        return Plan(Mesh((("pp", self.ranks),)), pipeline=pipeline)


def backend_of(name: str, ours: str) -> str:
    """Return the backend that a contestant runs on, where ours run on `ours`."""
    return GLOO if name != SERIAL and Contestant.named(name).side is Side.TORCH else ours


def set_up(setting: Setting, name: str, world: World, groups: Groups) -> Contender:
    """Return a contestant ready to train a module of its own; a collective. Ours uses the default group."""
    workload = setting.workload
    module, batch = workload.build()
    if name == SERIAL:
        return plain(module, batch, workload)
    who = Contestant.named(name)
    match who.side:
        case Side.OURS:
            return as_trained(setting, pipelined(setting, who.schedule, module, batch), batch)
        case Side.CONTROL:
            return without_messages(setting, control(setting, who.schedule, module, batch))
        case Side.TORCH:
            assert isinstance(module, GPT)
            group = groups.on(backend_of(name, ours=GLOO))
            stages = TorchPipeline(module, batch, who.schedule.kind, setting.micro_batches, group)
            return Contender(stages.step, workload.optimizer(stages.parameters), backward=_nothing)


def pipelined(setting: Setting, schedule: Schedule, module: nn.Module, batch: Batch) -> PipelinedModule:
    """Return ours on a schedule; a collective."""
    ours = parallelize(module, batch, setting.plan(schedule))
    assert isinstance(ours, PipelinedModule)
    return ours


def as_trained(setting: Setting, ours: PipelinedModule, batch: Batch) -> Contender:
    """Return ours as anybody trains it: a call, `backward()` of its loss, and an optimizer."""
    return Contender(lambda: ours(**batch), setting.workload.optimizer(ours.parameters()), startup=ours.startups[0])


def control(setting: Setting, schedule: Schedule, module: nn.Module, batch: Batch) -> Control:
    """Return ours on a schedule without communication; a collective."""
    return Control(pipelined(setting, schedule, module, batch), batch, setting.plan(schedule))


def without_messages(setting: Setting, alone: Control) -> Contender:
    """Return a control with an optimizer."""
    return Contender(alone.step, setting.workload.optimizer(alone.parameters), backward=_nothing)


def _nothing(loss: Tensor) -> None:
    """The backward pass of those whose step has it in it."""
