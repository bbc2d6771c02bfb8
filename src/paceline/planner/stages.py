"""What a pipeline amounts to: its stages, what they send, and what the schedule makes of them. Nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch.fx import Node

from paceline.plan import Plan
from paceline.planner.flow import Flow, placed_on_inner
from paceline.program.stages import Stage
from paceline.program.stages.kinds import is_call
from paceline.runtime.pipeline.replicas import check_replicas
from paceline.runtime.pipeline.scheduling import Schedules, edges_of
from paceline.runtime.pipeline.step import PipelineStep, stage_step
from paceline.schedule import Account, Op, Schedule, validate


@dataclass(frozen=True)
class StageTold:
    """One stage.

    Attributes:
        ranks: of the pipeline, that compute it.
        first, last: the modules that it begins and ends with.
        parameters: their names.
        parameter_bytes: on a rank of the inner mesh.
        seconds: modelled, forward and backward, of a micro-batch.
        saved_bytes: kept for the backward pass of a micro-batch.
        in_flight: how many micro-batches it holds at once.
    """

    ranks: tuple[int, ...]
    first: str
    last: str
    parameters: tuple[str, ...]
    parameter_bytes: int
    seconds: float
    saved_bytes: int
    in_flight: int


@dataclass(frozen=True)
class SentTold:
    """A tensor that goes from stage to stage with each micro-batch; `module` is the one that makes it."""

    source: int
    target: int
    backward: bool
    module: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class StagesTold:
    """A pipeline."""

    plan: Plan
    stages: tuple[StageTold, ...]
    sent: tuple[SentTold, ...]
    schedule: Schedule
    account: Account


def tell_stages(flow: Flow, plan: Plan, *, tell: Callable[[str], None] = lambda _: None) -> StagesTold:
    """Return what the pipeline of a plan amounts to.

    Raises:
        CaptureError, PlacementError: see `planner.explain`.
        PlanError: the module cannot be cut so.
        ScheduleError: the schedule does not fit; the message says what would.
    """
    schedules = Schedules(plan.pipeline, plan.mesh.stage_ranks)
    placed = placed_on_inner(flow, plan, tell)
    tell("cutting it into stages")
    module_of = {node.name: str(node.meta.get("module") or "") for node in placed.program.graph.nodes}
    step = stage_step(placed, plan, len(schedules.replicas), split_backward=schedules.splits_backward)
    check_replicas(step, schedules.replicas)
    pipeline = step.pipeline
    edges = edges_of(pipeline)
    schedule = schedules.training(flow.count, edges)
    account = validate(schedule, edges, _durations(pipeline.seconds))
    return StagesTold(
        plan,
        tuple(_stage(step, stage, schedule, account) for stage in pipeline.stages),
        tuple(_sent(step, module_of)),
        schedule,
        account,
    )


def _durations(seconds: tuple[float, ...]) -> dict[tuple[Op, int], float]:
    """A backward pass takes two thirds of a stage's time, each of its parts one."""
    thirds = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: 1}
    return {(op, stage): part * time / 3 for stage, time in enumerate(seconds) for op, part in thirds.items()}


def _stage(step: PipelineStep, stage: Stage, schedule: Schedule, account: Account) -> StageTold:
    number, pipeline = stage.index, step.pipeline
    modules = _modules(stage)
    return StageTold(
        ranks=schedule.replicas[number],
        first=modules[0] if modules else "",
        last=modules[-1] if modules else "",
        parameters=step.parameters_of(number),
        parameter_bytes=pipeline.parameter_bytes[number],
        seconds=pipeline.seconds[number],
        saved_bytes=pipeline.saved_bytes[number],
        in_flight=account.stage_peaks[number],
    )


def _modules(stage: Stage) -> list[str]:
    """The modules that a stage calls, in order, without the calls that any stage may repeat for itself."""
    calls: list[Node] = [node for node in stage.forward.graph.nodes if is_call(node)]
    return [str(node.meta["module"]) for node in calls if node.meta.get("module")]


def _sent(step: PipelineStep, module_of: Mapping[str, str]) -> Iterator[SentTold]:
    pipeline = step.pipeline
    for backward, edges in ((False, pipeline.forward_edges), (True, pipeline.backward_edges)):
        for (source, target), names in sorted(edges.items()):
            for name in names:
                sent = step.sent[name]
                dtype = str(sent.dtype).removeprefix("torch.")
                nbytes = prod(sent.shape) * sent.dtype.itemsize
                yield SentTold(source, target, backward, module_of.get(name, ""), tuple(sent.shape), dtype, nbytes)
