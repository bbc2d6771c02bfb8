"""Partition: the joint graph becomes a forward graph, which also returns what the backward graph needs."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from paceline.program.program import Input, InputRole, Output, OutputRole, Program


@dataclass
class Partition:
    """The two graphs of a step.

    The forward graph reads `forward_inputs` and returns `forward_outputs` followed by the saved values; the backward
    graph reads the saved values followed by the tangent, and returns `gradients`, in order of parameters.
    """

    forward: Graph
    backward: Graph | None
    forward_inputs: tuple[Input, ...]
    forward_outputs: tuple[Output, ...]
    gradients: tuple[str, ...]


def partition(program: Program) -> Partition:
    """Split a placed program into its forward and its backward graph."""
    graph = program.graph
    is_backward = {
        node: bool(node.meta.get("backward")) for node in graph.nodes if node.op not in ("placeholder", "output")
    }
    tangents = []
    inputs, forward_inputs = [], []
    for item, node in zip(program.inputs, program.placeholders, strict=True):
        is_backward[node] = item.role is InputRole.TANGENT
        if item.role is InputRole.TANGENT:
            tangents.append(node)
        else:
            inputs.append(node)
            forward_inputs.append(item)
    results = dict(zip(program.outputs, program.results, strict=True))
    forward_outputs = [output for output in program.outputs if output.role is not OutputRole.GRADIENT]
    gradients = [output for output in program.outputs if output.role is OutputRole.GRADIENT]
    # A value that an output of the forward pass depends on is computed there, whatever pass it was traced in.
    for output in forward_outputs:
        _pull_forward(results[output], is_backward)
    saved: dict[Node, None] = {}
    for node in graph.nodes:
        if node.op != "output" and is_backward[node]:
            saved.update((source, None) for source in node.all_input_nodes if not is_backward[source])
    saved.update((results[output], None) for output in gradients if not is_backward[results[output]])
    forward = _extract(graph, inputs, [node for node in graph.nodes if not is_backward.get(node, True)])
    forward.finish([results[output] for output in forward_outputs] + list(saved))
    backward = None
    if program.training:
        backward = _extract(graph, [*saved, *tangents], [node for node in graph.nodes if is_backward.get(node)])
        backward.finish([results[output] for output in gradients])
    return Partition(
        forward.graph,
        None if backward is None else backward.graph,
        tuple(forward_inputs),
        tuple(forward_outputs),
        tuple(output.name for output in gradients),
    )


def _pull_forward(node: Node, is_backward: dict[Node, bool]) -> None:
    if is_backward[node]:
        is_backward[node] = False
        for source in node.all_input_nodes:
            _pull_forward(source, is_backward)


class _Extraction:
    def __init__(self) -> None:
        self.graph = Graph()
        self.copy: dict[Node, Node] = {}

    def finish(self, values: list[Node]) -> None:
        self.graph.output(tuple(self.copy[value] for value in values))
        self.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def _extract(graph: Graph, inputs: list[Node], nodes: list[Node]) -> _Extraction:
    part = _Extraction()
    for node in inputs:
        part.copy[node] = part.graph.placeholder(node.name)
        part.copy[node].meta = dict(node.meta)
    for node in nodes:
        if node.op not in ("placeholder", "output") and node not in part.copy:
            part.copy[node] = part.graph.node_copy(node, lambda source: part.copy[source])
            part.copy[node].meta = dict(node.meta)
    return part
