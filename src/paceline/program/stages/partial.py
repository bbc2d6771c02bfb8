"""Partial gradients: what each stage adds to the gradient of a parameter.

A parameter that several stages read has a gradient that is a sum over stages. It is taken apart, so that no stage sends
gradients of parameters to another for every micro-batch.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from paceline.errors import PlanError
from paceline.program.program import OutputRole
from paceline.program.stages.assign import Assignment
from paceline.program.stages.kinds import distributes, is_sum
from paceline.program.stages.reading import Reading

aten = torch.ops.aten


def partial_gradients(reading: Reading, assignment: Assignment) -> list[dict[str, Node]]:
    """Return, for each stage, the values that are its part of the gradient of each parameter; writes their sums.

    Raises:
        PlanError: the gradient of a parameter is not made where the parameter is.
    """
    found: list[dict[str, Node]] = [{} for _ in range(assignment.count)]
    for output, result in reading.result_of.items():
        if output.role is OutputRole.GRADIENT:
            holders = assignment.holders.get(output.name)
            for stage, node in _Terms(reading, assignment, output.name).of(result).items():
                if holders is not None and stage not in holders:
                    raise PlanError(
                        f"the gradient of '{output.name}' would be made by stage {stage}, and only the stages "
                        f"{sorted(holders)} have it: its backward pass goes back and forth between stages. Choose "
                        "other boundaries, so that one stage has the modules that share it."
                    )
                found[stage][output.name] = node
    return found


class _Terms:
    def __init__(self, reading: Reading, assignment: Assignment, name: str) -> None:
        self._reading = reading
        self._stage = assignment.stage
        self._holders = assignment.holders.get(name, frozenset({0}))
        self._last = reading.program.output_node

    def of(self, node: Node) -> dict[int, Node]:
        """Return the terms of a gradient, one for each stage that makes one."""
        if not self._reading.is_gradient(node):
            return {self._stage.get(node, min(self._holders)): node}
        sources = node.all_input_nodes
        if is_sum(node) and all(map(self._reading.is_gradient, sources)):
            one, other = (self.of(source) for source in node.args[:2])  # type: ignore[arg-type]  # is_sum
            # A sum of gradients of what the parameter was added to is taken where it comes together.
            apart = {*one, *other} <= self._holders and {*one, *other} != {self._stage[node]}
            return self._sums(one, other) if apart else {self._stage[node]: node}
        if distributes(node) and self._reading.is_gradient(sources[0]):
            terms = self.of(sources[0])
            if len(terms) > 1:
                return {stage: self._call_of(node, term, stage) for stage, term in terms.items()}
        return {self._stage[node]: node}

    def _sums(self, one: dict[int, Node], other: dict[int, Node]) -> dict[int, Node]:
        return {
            stage: self._sum(one[stage], other[stage], stage)
            if stage in one and stage in other
            else one.get(stage) or other[stage]
            for stage in sorted({*one, *other})
        }

    def _sum(self, one: Node, other: Node, stage: int) -> Node:
        with self._reading.program.graph.inserting_before(self._last):
            total = self._reading.program.graph.call_function(aten.add.Tensor, (one, other))
        total.meta = {**one.meta, "sequence": None}
        return self._noted(total, stage)

    def _call_of(self, node: Node, term: Node, stage: int) -> Node:
        with self._reading.program.graph.inserting_before(self._last):
            copy = self._reading.program.graph.node_copy(node, lambda source: source)
        copy.args, copy.kwargs = map_arg((node.args, node.kwargs), lambda _: term)
        copy.meta = dict(node.meta)
        return self._noted(copy, stage)

    def _noted(self, node: Node, stage: int) -> Node:
        self._reading.add_gradient(node)
        self._stage[node] = stage
        return node
