"""A step of a module in virtual time: captured and placed as `paceline plan` does, and run on a described cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from paceline.cluster.cluster import Cluster
from paceline.cluster.files import load
from paceline.placement.costs import Costs
from paceline.placement.machine_of import machine_of
from paceline.placement.place import place
from paceline.plan import Plan
from paceline.planner.flow import Flow, placed_on_inner
from paceline.program.capture import Batch, capture
from paceline.runtime.pipeline.pieces import count_for, micro_batches
from paceline.runtime.pipeline.replicas import check_replicas
from paceline.runtime.pipeline.scheduling import Schedules
from paceline.runtime.pipeline.step import stage_step
from paceline.runtime.planning import in_modes, training_modes
from paceline.runtime.program_cache import default_directory
from paceline.runtime.step import schedule
from paceline.simulator.calibration.calibrate import default_path
from paceline.simulator.placed.modelled import modelled_times, slow_ranks
from paceline.simulator.placed.pipeline import simulate_pipeline
from paceline.simulator.placed.simulation import Simulation
from paceline.simulator.placed.step import Circumstances, simulate_step
from paceline.simulator.placed.times import Times
from paceline.simulator.placed.workspace import MeasuredWorkspaces

_LAPTOP = "laptop"


def default_cluster() -> Cluster:
    """Return this machine as `paceline calibrate` found it, or the described laptop where it was not called."""
    if default_directory() is None:  # nothing is kept
        return load(_LAPTOP)
    path = default_path()
    return load(path if path.exists() else _LAPTOP)


def simulate(
    module: nn.Module,
    batch: Batch,
    plan: Plan,
    *,
    cluster: Cluster | str | None = None,
    times: Times | None = None,
    autocast: torch.dtype | None = None,
    given: Circumstances | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Simulation:
    """Return what a training step of `module` comes to under a plan: seconds, waiting and memory of each rank.

    No rank is started: the placed program that would run is run in virtual time.

    Args:
        module: called as `module(*batch)` or `module(**batch)`, returns a scalar loss or an object with `.loss`.
        batch: an example of a global batch, a tuple or a dictionary. A pipeline cuts it into micro-batches, as many as
            the plan says; without one it is cut where the plan says so.
        plan: mesh and options.
        cluster: where, or its name or file; by default this machine as `paceline calibrate` found it, or `laptop`.
        times: how long calls and collectives take, where somebody knows better than the cluster.
        autocast: run the forward pass under autocast to this dtype.
        given: the optimizer, slow ranks, and what else a step depends on.
        tell: is told what is being done, in a few words.

    Raises:
        CaptureError, PlacementError: see `explain`.
        PlanError: the mesh does not fit the batch or the cluster.
        ScheduleError: the schedule does not fit.
        ClusterError: there is no such cluster, or it has fewer devices.
    """
    wanted = plan.pipeline.micro_batches
    pieces = [batch]
    if plan.mesh.stage_ranks > 1 or wanted is not None:
        parts = plan.mesh.batch_parts
        pieces = micro_batches(batch, count_for(batch, plan, parts), parts)
    flow = Flow(module, pieces[0], len(pieces), autocast)
    return simulate_flow(flow, plan, cluster=cluster, times=times, given=given, tell=tell)


def simulate_flow(
    flow: Flow,
    plan: Plan,
    *,
    cluster: Cluster | str | None = None,
    times: Times | None = None,
    given: Circumstances | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Simulation:
    """Return what `simulate` does for a module, one of its micro-batches and their number."""
    given = given or Circumstances()
    here = default_cluster()
    where = load(cluster) if isinstance(cluster, str) else cluster or here
    if times is None:
        is_elsewhere = where != here  # this machine's steps are placed by what its runs measured
        where = where.of(plan.mesh.size)
        if not is_elsewhere and given.workspaces is None:
            given = replace(given, workspaces=MeasuredWorkspaces())  # kernels of this machine can be asked
        if is_elsewhere:
            flow = replace(flow, elsewhere=Costs.of_machine(machine_of(where, plan.mesh)))
        times = modelled_times(where, plan.mesh, plan)
        given = replace(given, slowness={**slow_ranks(where, plan.mesh.size), **given.slowness})
    given = replace(given, micro_batches=flow.count)
    if plan.mesh.stage_ranks > 1:
        return _pipeline(flow, plan, times, given, tell)
    tell("capturing a training step")
    with in_modes(flow.module, training_modes(flow.module)):
        program = capture(flow.module, flow.batch, autocast=flow.autocast)
    tell("placing it")
    step = schedule(place(program, plan, costs=flow.costs), plan)
    tell("running it in virtual time")
    return simulate_step(step, plan, times, given)


def _pipeline(flow: Flow, plan: Plan, times: Times, given: Circumstances, tell: Callable[[str], None]) -> Simulation:
    schedules = Schedules(plan.pipeline, plan.mesh.stage_ranks)
    placed = placed_on_inner(flow, plan, tell)
    tell("cutting it into stages")
    step = stage_step(placed, plan, len(schedules.replicas), split_backward=schedules.splits_backward)
    check_replicas(step, schedules.replicas)
    tell("running them in virtual time")
    return simulate_pipeline(step, plan, flow.count, times, given)
