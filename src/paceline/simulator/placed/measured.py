"""Steps in virtual time with times of this machine: calls that were timed, and collectives between the ranks here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Graph

from paceline.errors import PlanError
from paceline.placement.costs import Costs
from paceline.program.capture import Batch
from paceline.runtime.interface import ParallelModule
from paceline.runtime.link_times import KINDS, MeasuredCollectives, measured_collectives
from paceline.runtime.module import PlacedModule
from paceline.runtime.operator_times import MeasuredOperators, roofline
from paceline.runtime.peers import Peers
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.runtime.pipeline.step import PipelineStep
from paceline.runtime.pipeline.stored import pipeline_from_json, pipeline_to_json
from paceline.runtime.step import Step
from paceline.runtime.traffic import exchanges
from paceline.simulator.placed.pipeline import simulate_pipeline, trained_on
from paceline.simulator.placed.simulation import Simulation
from paceline.simulator.placed.step import Circumstances, simulate_step, trained_pieces
from paceline.simulator.placed.times import Times
from paceline.simulator.placed.update import Update, update_of

KINDS_ALONG: Mapping[str, Sequence[str]] = {
    "dp": ("all_reduce",),
    "fsdp": ("all_reduce", "reduce_scatter", "all_gather"),
    "pp": ("send",),
}
"""What goes along an axis; along others anything may."""


def graphs_of(module: ParallelModule, batch: Batch, given: Circumstances) -> list[Graph]:
    """Return every graph that a step runs on some rank, in order, the optimizer's update last.

    Raises:
        PlanError: the module runs no placed program.
    """
    match module:
        case PlacedModule():
            step = _called(module.step, batch)
            update = update_of(list(trained_pieces(step).values()), given.optimizer, clips=given.clips)
            return [*_graphs(step), *_of_update(update)]
        case PipelinedModule():
            first = _weighed(_called(module.steps, batch)[0])
            return [*_of_stages(first), *_of_updates(first, given)]
    raise PlanError("a module under a fallback has no placed program, so nothing can be said of its steps.")


def simulated(module: ParallelModule, batch: Batch, times: Times, given: Circumstances) -> Simulation:
    """Return a step of a module in virtual time.

    Args:
        module: placed.
        batch: a global batch of one micro-batch; a pipeline cuts it further, where its plan says so.
        times: how long calls and collectives take.
        given: what it depends on beside.

    Raises:
        PlanError: the module runs no placed program.
    """
    match module:
        case PlacedModule():
            return simulate_step(_called(module.step, batch), module.plan, times, given)
        case PipelinedModule():
            steps = _called(module.steps, batch)
            return simulate_pipeline(_weighed(steps[0]), module.plan, len(steps) * given.micro_batches, times, given)
    raise PlanError("a module under a fallback has no placed program, so nothing can be said of its steps.")


def peak_here(module: ParallelModule, simulation: Simulation, times: Times) -> int:
    """Return the most bytes that a rank of this machine is seen to have.

    Room in shared memory, in which gradients are added up over parts of the batch, stays when nothing is in it.
    """
    keeps = times.shares_memory and isinstance(module, PlacedModule) and module.mesh.batch_parts > 1
    return max(rank.peak.resident if keeps else rank.peak.bytes for rank in simulation.ranks)


def handed_bytes(module: ParallelModule, batch: Batch, micro_batches: int) -> dict[str, int]:
    """Return the bytes that a rank hands over in a step, by axis, counted in its graphs; nothing of a pipeline."""
    found: Counter[str] = Counter()
    if isinstance(module, PlacedModule):
        for graph in _graphs(_called(module.step, batch)):
            for exchange in exchanges(graph):
                found[exchange.axis] += exchange.bytes * micro_batches
    return dict(found)


def collectives_of(module: ParallelModule) -> MeasuredCollectives:
    """Measure what collectives take along each axis of a module's mesh; a collective."""
    points: dict[str, Any] = {}
    for axis, parts in module.plan.mesh.axes:
        if parts > 1:
            points |= measured_collectives(
                module.peers, module.plan.mesh, axes=(axis,), kinds=KINDS_ALONG.get(axis, KINDS)
            ).points
    return MeasuredCollectives(points)


def times_here(timed: Mapping[str, float], collectives: MeasuredCollectives, costs: Costs, peers: Peers) -> Times:
    """Return times of this machine.

    Args:
        timed: seconds of calls by key, see `runtime.operator_times`.
        collectives: between the ranks of this job.
        costs: for calls that were not timed.
        peers: the ranks.
    """
    on_host = peers.devices[0].type == "cpu"
    shares = on_host and bool(peers.groups) and all(group.shared is not None for group in peers.groups.values())
    return Times(
        operators=MeasuredOperators(timed, roofline(costs), shares_memory=shares),
        collectives=collectives,
        launch_s=0.0 if on_host else costs.machine.per_call,
        overlap=not on_host,  # on a host, whatever exchanges takes the core of a rank that computes
        shares_memory=shares,
        source="measured on this machine",
    )


def _called(step: Callable[..., Any], batch: Batch) -> Any:
    return step(**batch) if isinstance(batch, dict) else step(*batch)


def _weighed(step: PipelineStep) -> PipelineStep:
    """Return a step as it was before it was stored: what runs knows neither tensors without data nor their names."""
    found = pipeline_from_json(pipeline_to_json(step), step.constants, fakes=True)
    values: dict[str, Any] = {}
    for stage in found.pipeline.stages:
        for part in (stage.forward, stage.backward, stage.backward_input, stage.backward_weight):
            if part is not None:
                nodes = [node for node in part.graph.nodes if node.op == "placeholder"]
                outputs = next(node for node in reversed(part.graph.nodes) if node.op == "output").args[0]
                values |= {name: node.meta["val"] for name, node in zip(part.inputs, nodes, strict=True)}
                values |= {name: node.meta["val"] for name, node in zip(part.outputs, outputs, strict=True)}
    return replace(found, pipeline=replace(found.pipeline, values=values))


def _graphs(step: Step) -> list[Graph]:
    return [step.forward, *([step.backward] if step.backward is not None else [])]


def _of_stages(step: PipelineStep) -> Iterable[Graph]:
    for stage in step.pipeline.stages:
        for part in (stage.forward, stage.backward, stage.backward_input, stage.backward_weight):
            if part is not None:
                yield part.graph
    for reduction in step.reductions:
        if reduction is not None:
            yield reduction.graph


def _of_updates(step: PipelineStep, given: Circumstances) -> Iterable[Graph]:
    for stage in step.pipeline.stages:
        pieces = list(trained_on(step, [stage.index]).values())
        yield from _of_update(update_of(pieces, given.optimizer, clips=given.clips))


def _of_update(update: Update) -> list[Graph]:
    return [update.add, update.average, update.norm, update.step]
