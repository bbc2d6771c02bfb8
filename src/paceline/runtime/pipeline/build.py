"""From a user's module to the stages of a pipeline."""

from __future__ import annotations

import torch
from torch import nn

from paceline.errors import PlanError
from paceline.plan import Plan
from paceline.program.capture import Batch
from paceline.runtime.job.roles import tell_role
from paceline.runtime.peers import Peers
from paceline.runtime.pipeline.maker import PipelineMaker
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.runtime.pipeline.pieces import count_for, micro_batches
from paceline.runtime.pipeline.ranks import StageRanks
from paceline.runtime.pipeline.replicas import check_replicas
from paceline.runtime.pipeline.scheduling import Schedules
from paceline.runtime.planning import Planner


def pipelined(
    module: nn.Module, batch: Batch, plan: Plan, peers: Peers, autocast: torch.dtype | None, *, lifted: bool
) -> PipelinedModule:
    """Return a module whose layers lie on the ranks of the axis `pp`; for the arguments, see `parallelize`.

    Raises:
        CaptureError: the module cannot be captured.
        PlanError, ScheduleError: it cannot be cut into so many stages, or the schedule does not fit.
    """
    schedules = Schedules(plan.pipeline, plan.mesh.stage_ranks)
    stages = len(schedules.replicas)
    beyond = [stage for stage in plan.pipeline.recompute if not 0 <= stage < stages]
    if beyond:
        raise PlanError(f"recompute names the stages {beyond}, but there are {stages}: 0 to {stages - 1}.")
    planner = Planner(module, plan, peers, autocast, PipelineMaker(schedules), lifted=lifted)
    parts = plan.mesh.batch_parts
    first = micro_batches(batch, count_for(batch, plan, parts), parts)[0]
    step = planner.step(first, training=True, split=True)
    check_replicas(step, schedules.replicas)
    ranks = StageRanks(module, step, plan, peers, schedules.replicas, planner.hollow)
    if not peers.alone:
        here = [str(stage) for rank in ranks.here for stage in rank.stages]
        tell_role(f"stage{'s' * (len(here) > 1)} {' and '.join(here)} of the pipeline")
    return PipelinedModule(plan, planner, peers, ranks, schedules)
