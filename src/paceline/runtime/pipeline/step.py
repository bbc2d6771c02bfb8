"""What the ranks of a pipeline run for micro-batches of one shape: the stages of a placed program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from paceline.placement.place import PlacedProgram
from paceline.placement.placements import PARTIAL, REPLICATE, Shape
from paceline.placement.redistribute import is_redistribution, redistribute, redistribution_of
from paceline.plan import Mesh, Plan
from paceline.program.program import InputRole, OutputRole, Program
from paceline.program.random import is_random
from paceline.program.stages import Pipeline, cut
from paceline.runtime.passes.communicate import communicate
from paceline.runtime.passes.recompute import regather_parameters
from paceline.runtime.step import PlacedInput

Pair = tuple[int, int]
Edges = dict[Pair, tuple[str, ...]]
GENERATOR = "generator"
"""Name of the value that carries the state of the random generator from stage to stage; see `pipeline.generator`."""
SHARE = "share"
"""Name of the value that carries what a micro-batch counts by to earlier stages; see `pipeline.shares`."""


@dataclass(frozen=True)
class Sent:
    """A tensor that travels between stages, as every rank has it."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Reduction:
    """Sums of gradients over the ranks of a stage, made once for all micro-batches.

    Attributes:
        graph: reads this rank's sum over its micro-batches, for each of `parameters`, and returns the sum over ranks.
    """

    graph: Graph
    parameters: tuple[str, ...]


@dataclass
class PipelineStep:
    """What a rank of a pipeline runs; the same on every rank.

    Attributes:
        mesh: the inner mesh, whose axes the collectives use.
        pipeline: the stages, with their collectives in order.
        reductions: for each stage, or None where it has nothing to add up.
        inputs: parameters, buffers and batch; they carry their placements on the inner mesh.
        sent: what travels between stages, by name.
        draws: whether operators draw random numbers.
        counts: whether the program computes the weight of its loss.
        loss_dtype: type of the loss.
        constants: tensors that `get_attr` nodes read.
        aliases: further names of tied parameters and buffers.
        weight: the weight of the loss of a micro-batch where it does not depend on the data; see `Program.weight`.
        unknown_operators: operators without a rule, computed whole on every rank.
    """

    mesh: Mesh
    pipeline: Pipeline
    reductions: tuple[Reduction | None, ...]
    inputs: tuple[PlacedInput, ...]
    sent: dict[str, Sent]
    draws: bool
    counts: bool
    loss_dtype: torch.dtype
    constants: dict[str, Tensor]
    aliases: dict[str, str]
    weight: float | None
    unknown_operators: tuple[str, ...]

    @property
    def loss_stage(self) -> int:
        """The stage that computes the loss."""
        return next(
            stage.index
            for stage in self.pipeline.stages
            if any(output.role is OutputRole.LOSS for output in stage.outputs)
        )

    def parameters_of(self, stage: int) -> tuple[str, ...]:
        """Return the parameters that a stage reads, in order."""
        return tuple(dict.fromkeys(self.reads(stage, InputRole.PARAMETER).values()))

    def reads(self, stage: int, role: InputRole) -> dict[str, str]:
        """Return the inputs of a role that a stage reads: the value's name, and the name it has for the user."""
        found = self.pipeline.stages[stage]
        parts = (found.forward, found.backward, found.backward_input, found.backward_weight)
        values = dict.fromkeys(name for part in parts if part is not None for name in part.inputs)
        inputs = self.pipeline.inputs
        return {name: inputs[name].name for name in values if name in inputs and inputs[name].role is role}


def stage_step(
    placed: PlacedProgram, plan: Plan, stages: int, *, split_backward: bool, like: Pipeline | None = None
) -> PipelineStep:
    """Cut a placed program into stages and put the collectives of each in order. The program is used up.

    Args:
        placed: on the inner mesh of the plan.
        plan: its pipeline says where stages begin.
        stages: how many there are.
        split_backward: make the two parts of backward passes, for schedules that run them apart.
        like: stages of the same module for micro-batches of another shape; the cuts are theirs.

    Raises:
        PlanError: the program cannot be cut so.
    """
    program = placed.program
    shapes = {item: placed.global_shape(item) for item in program.inputs}
    if plan.zero_stage == 3:
        regather_parameters(program)
    sums = _take_off_sums(program)
    pipeline = cut(
        program,
        stages,
        boundaries=plan.pipeline.boundaries,
        split_backward=split_backward,
        memory_bytes=plan.memory_bytes,
        same_as=like,
    )
    draws = any(is_random(node) for node in program.graph.nodes)
    counts = any(output.role is OutputRole.WEIGHT for output in program.outputs)
    reductions = tuple(_reduction(stage.gradients, sums, plan.bucket_bytes) for stage in pipeline.stages)
    for stage in pipeline.stages:
        for part in (stage.forward, stage.backward, stage.backward_input, stage.backward_weight):
            if part is not None:
                communicate(part.graph, plan.bucket_bytes)
    sent = {name: _sent(pipeline.values[name]) for name in _travelling(pipeline)}
    loss = program.results[0].meta["val"]
    if draws:
        pipeline = replace(pipeline, forward_edges=_along(pipeline.forward_edges, stages, GENERATOR, forward=True))
        sent[GENERATOR] = _generator_state(loss.device)
    if counts:
        pipeline = replace(pipeline, backward_edges=_along(pipeline.backward_edges, stages, SHARE, forward=False))
        sent[SHARE] = Sent((), torch.float64)
    return PipelineStep(
        mesh=placed.mesh,
        pipeline=pipeline,
        reductions=reductions,
        inputs=tuple(
            PlacedInput(item, shapes[item], placed.placements[item])
            for item in program.inputs
            if item.role is not InputRole.TANGENT
        ),
        sent=sent,
        draws=draws,
        counts=counts,
        loss_dtype=loss.dtype,
        constants=program.constants,
        aliases=program.aliases,
        weight=program.weight,
        unknown_operators=placed.unknown_operators,
    )


@dataclass(frozen=True)
class _Sum:
    """A redistribution that adds up partial sums: its arguments but the tensor, and `meta` before and after it."""

    how: tuple[Any, ...]
    before: dict[str, Any]
    after: dict[str, Any]


def _travelling(pipeline: Pipeline) -> set[str]:
    edges = (*pipeline.forward_edges.values(), *pipeline.backward_edges.values())
    return {name for names in edges for name in names}


def _along(edges: Mapping[Pair, tuple[str, ...]], stages: int, name: str, *, forward: bool) -> Edges:
    """Return edges along which one more value goes from each stage to the next, or from each to the one before."""
    found = dict(edges)
    for stage in range(stages - 1):
        pair = (stage, stage + 1) if forward else (stage + 1, stage)
        found[pair] = (*found.get(pair, ()), name)
    return found


def _sent(value: Tensor) -> Sent:
    return Sent(tuple(value.shape), value.dtype)


def _generator_state(device: torch.device) -> Sent:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return Sent(tuple(state.shape), state.dtype)


def _take_off_sums(program: Program) -> dict[str, list[_Sum]]:
    """Let gradients leave the program before they are added up over ranks; return what would have added them.

    Micro-batches are added up first, so that each parameter's gradient is sent once for all of them.
    """
    sums: dict[str, list[_Sum]] = {}
    values = list(program.results)
    for index, output in enumerate(program.outputs):
        if output.role is not OutputRole.GRADIENT:
            continue
        while _adds_up_ranks(values[index]):
            source, *how = redistribution_of(values[index])
            sums.setdefault(output.name, []).insert(0, _Sum(tuple(how), dict(source.meta), dict(values[index].meta)))
            values[index] = source
    program.output_node.args = (tuple(values),)
    program.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return sums


def _adds_up_ranks(node: Node) -> bool:
    if not is_redistribution(node):
        return False
    _, source, target, _, _ = redistribution_of(node)
    return source == PARTIAL and target == REPLICATE


def _reduction(gradients: Mapping[str, str], sums: Mapping[str, list[_Sum]], bucket_bytes: int) -> Reduction | None:
    names = tuple(name for name in gradients if name in sums)
    if not names:
        return None
    graph = Graph()
    values = []
    for position, name in enumerate(names):
        value = graph.placeholder(f"gradient_{position}")
        value.meta = dict(sums[name][0].before)
        values.append(value)
    for position, name in enumerate(names):
        for found in sums[name]:
            values[position] = graph.call_function(redistribute, (values[position], *found.how))
            values[position].meta = dict(found.after)
    graph.output(tuple(values))
    communicate(graph, bucket_bytes)
    return Reduction(graph, names)
