"""An assignment of values to stages becomes a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch.fx import Node

from paceline.program.program import InputRole, Output, OutputRole
from paceline.program.stages.assign import Assignment
from paceline.program.stages.extract import extract
from paceline.program.stages.halves import halve
from paceline.program.stages.kinds import bytes_of
from paceline.program.stages.needs import Edge, Needs
from paceline.program.stages.partial import partial_gradients
from paceline.program.stages.pipeline import Part, Pipeline, Stage
from paceline.program.stages.reading import Reading


class Writer:
    """Writes the stages of a program whose values have their places."""

    def __init__(self, reading: Reading, assignment: Assignment, copies: Mapping[str, Node]) -> None:
        self._reading = reading
        self._count = assignment.count
        self._gradients = partial_gradients(reading, assignment)
        self._outputs: list[dict[Output, Node]] = [{} for _ in range(self._count)]
        for output, node in reading.result_of.items():
            if output.role is OutputRole.BUFFER:  # a free value is as good anywhere, but where the buffer is read
                made = assignment.stage.get(node, assignment.stage.get(copies.get(output.name, node), 0))
                self._outputs[made][output] = node
            elif output.role is not OutputRole.GRADIENT:  # the last stage returns loss and weight
                self._outputs[-1][output] = node
        self._needs = Needs(reading, assignment)
        for stage in range(self._count):
            self._needs.of_outputs(stage, self._outputs[stage].values())
            self._needs.of_gradients(stage, self._gradients[stage].values())
        self._forward_edges, self._backward_edges = self._needs.forward_edges, self._needs.backward_edges

    def pipeline(self, cuts: tuple[str, ...], seconds_of: Callable[[Node], float], *, split_backward: bool) -> Pipeline:
        """Return the pipeline."""
        stages = tuple(self._stage(index, split_backward) for index in range(self._count))
        nodes = {node.name: node for node in self._reading.order}
        named = {name for stage in stages for part in _parts(stage) for name in (*part.inputs, *part.outputs)}
        return Pipeline(
            stages=stages,
            forward_edges=self._edges(self._forward_edges),
            backward_edges=self._edges(self._backward_edges),
            inputs={node.name: item for node, item in self._reading.input_of.items()},
            values={node.name: node.meta["val"] for node in nodes.values() if node.name in named},
            cuts=cuts,
            seconds=tuple(_seconds(stage, seconds_of) for stage in stages),
            parameter_bytes=tuple(self._parameter_bytes(stage) for stage in stages),
            saved_bytes=tuple(sum(bytes_of(nodes[name]) for name in stage.saved) for stage in stages),
        )

    def _stage(self, index: int, split_backward: bool) -> Stage:
        received = _ending(self._forward_edges, index)
        saved = self._needs.saved[index]
        sent = self._ordered(_beginning(self._forward_edges, index))
        own = self._ordered(saved - received)
        outputs, gradients = self._outputs[index], self._gradients[index]
        forward = extract(self._reading, [*sent, *outputs.values(), *own], received, backward=False)
        given = saved | _ending(self._backward_edges, index)
        back = self._ordered(_beginning(self._backward_edges, index))
        training = self._reading.program.training
        halves = halve(self._reading, back, gradients, given) if training and split_backward else None
        return Stage(
            index=index,
            forward=forward,
            backward=extract(self._reading, [*back, *gradients.values()], given, backward=True) if training else None,
            backward_input=None if halves is None else halves.input,
            backward_weight=None if halves is None else halves.weight,
            outputs={output: node.name for output, node in outputs.items()},
            gradients={name: node.name for name, node in gradients.items()},
            saved=tuple(node.name for node in self._ordered(saved)),
            kept=() if halves is None else tuple(node.name for node in halves.kept),
        )

    def _ordered(self, nodes: Iterable[Node]) -> list[Node]:
        return sorted(nodes, key=self._reading.order.__getitem__)

    def _edges(self, edges: Mapping[Edge, set[Node]]) -> dict[Edge, tuple[str, ...]]:
        return {edge: tuple(node.name for node in self._ordered(edges[edge])) for edge in sorted(edges)}

    def _parameter_bytes(self, stage: Stage) -> int:
        read = {name for part in _parts(stage) for name in part.inputs}
        items = self._reading.input_of.items()
        return sum(bytes_of(node) for node, item in items if item.role is InputRole.PARAMETER and node.name in read)


def _parts(stage: Stage) -> list[Part]:
    parts = (stage.forward, stage.backward, stage.backward_input, stage.backward_weight)
    return [part for part in parts if part is not None]


def _seconds(stage: Stage, seconds_of: Callable[[Node], float]) -> float:
    parts = [part for part in (stage.forward, stage.backward) if part is not None]
    return sum(seconds_of(node) for part in parts for node in part.graph.nodes)


def _beginning(edges: Mapping[Edge, set[Node]], stage: int) -> set[Node]:
    return set().union(*(nodes for (source, _), nodes in edges.items() if source == stage))


def _ending(edges: Mapping[Edge, set[Node]], stage: int) -> set[Node]:
    return set().union(*(nodes for (_, target), nodes in edges.items() if target == stage))
