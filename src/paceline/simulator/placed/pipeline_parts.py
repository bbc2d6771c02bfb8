"""How long the parts of a pipeline take: what stages compute for a micro-batch, and what they send each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.fx import Graph, Node

from paceline.plan import Axis, Mesh, Plan
from paceline.runtime.pipeline.step import PipelineStep, Sent
from paceline.runtime.pipeline.wire import wire_named
from paceline.schedule import Op, Payload
from paceline.simulator.placed.ranks import Ranks
from paceline.simulator.placed.times import Times
from paceline.simulator.placed.walk import walk
from paceline.trace import Event

PP = Axis.PP.value
Part = tuple[Op, int]
"""An action, and its stage."""
Edge = tuple[Payload, int, int]
"""What a message carries, and from which stage to which."""


@dataclass(frozen=True)
class Walked:
    """What some graphs, one after the other, take on a rank of a stage.

    Attributes:
        seconds: from the first call to the end of the last.
        compute_s: of calls.
        exposed_s: waiting for collectives, by axis of the inner mesh.
        handed_bytes: by axis.
        events: of one run that begins at 0.
    """

    seconds: float
    compute_s: float
    exposed_s: Mapping[str, float]
    handed_bytes: Mapping[str, int]
    events: tuple[Event, ...] = ()

    @property
    def launch_s(self) -> float:
        """Waiting for the host to start calls."""
        return max(0.0, self.seconds - self.compute_s - sum(self.exposed_s.values()))


def walked(graphs: Sequence[Graph | None], mesh: Mesh, times: Times) -> Walked:
    """Return what graphs take, one after the other, on ranks that are alike."""
    ranks = Ranks(mesh, launch_s=times.launch_s, watched=(0,))
    for graph in graphs:
        if graph is not None:
            walk(graph, times, ranks)
    return Walked(
        ranks.of(0, ranks.now),
        ranks.of(0, ranks.computed),
        {axis: ranks.of(0, seconds) for axis, seconds in ranks.exposed.items()},
        dict(ranks.handed_bytes),
        tuple(ranks.events),
    )


def walked_parts(step: PipelineStep, plan: Plan, times: Times, sums: Sequence[Graph]) -> dict[Part, Walked]:
    """Return what each part of each stage takes for a micro-batch.

    Args:
        step: the stages.
        plan: which of them compute their forward pass again.
        times: how long calls and collectives take.
        sums: for each stage, what adds the gradients of a micro-batch to those of the ones before.
    """
    found: dict[Part, Walked] = {}
    for stage in step.pipeline.stages:
        number = stage.index
        again = stage.forward.graph if number in plan.pipeline.recompute else None
        graphs: dict[Op, list[Graph | None]] = {Op.FORWARD: [stage.forward.graph]}
        if stage.backward is not None:
            graphs[Op.BACKWARD] = [again, stage.backward.graph, sums[number]]
        if stage.backward_input is not None:
            graphs[Op.BACKWARD_INPUT] = [again, stage.backward_input.graph]
        if stage.backward_weight is not None:
            graphs[Op.BACKWARD_WEIGHT] = [stage.backward_weight.graph, sums[number]]
        for op, listed in graphs.items():
            found[op, number] = walked(listed, step.mesh, times)
    return found


def values_of(step: PipelineStep) -> dict[str, Tensor]:
    """Return what goes into the parts of stages and comes out of them, without data, by name.

    Read off their graphs: a step that was stored and read again knows it nowhere else.
    """
    found: dict[str, Tensor] = {}
    for stage in step.pipeline.stages:
        for part in (stage.forward, stage.backward, stage.backward_input, stage.backward_weight):
            if part is not None:
                given = [node for node in part.graph.nodes if node.op == "placeholder"]
                nodes = [*zip(part.inputs, given, strict=True), *zip(part.outputs, outputs_of(part.graph), strict=True)]
                for name, node in nodes:
                    found.setdefault(name, node.meta["val"])
    return found


def outputs_of(graph: Graph) -> list[Node]:
    """Return the nodes whose values a graph returns."""
    (values,) = next(node for node in reversed(graph.nodes) if node.op == "output").args
    assert isinstance(values, (list, tuple))
    return [value for value in values if isinstance(value, Node)]


def trained_on(step: PipelineStep, stages: Sequence[int]) -> dict[str, Tensor]:
    """Return the pieces of trained parameters of some stages on a rank, without data, by name."""
    values = values_of(step)
    found: dict[str, Tensor] = {}
    for number in stages:
        for name, value in step.pipeline.stages[number].gradients.items():
            found.setdefault(name, values[value])
    return found


def message_bytes(step: PipelineStep, plan: Plan) -> dict[Edge, int]:
    """Return the bytes of a message along each edge, as they travel."""
    wire = wire_named(plan.pipeline.wire)
    pipeline = step.pipeline
    both = ((Payload.ACTIVATION, pipeline.forward_edges), (Payload.GRADIENT, pipeline.backward_edges))
    return {
        (payload, *pair): sum(_bytes(part) for name in names for part in wire.layout(step.sent[name]))
        for payload, edges in both
        for pair, names in edges.items()
    }


def _bytes(sent: Sent) -> int:
    return prod(sent.shape) * sent.dtype.itemsize
