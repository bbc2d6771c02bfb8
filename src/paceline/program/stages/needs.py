"""What stages send each other, and what each saves for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable

from torch._ops import OpOverload
from torch.fx import Node

from paceline.program.random import is_random
from paceline.program.stages.assign import Assignment
from paceline.program.stages.kinds import is_call, is_cheap, is_light
from paceline.program.stages.reading import Reading

Edge = tuple[int, int]


class Needs:
    """What the parts of each stage need.

    Attributes:
        forward_edges, backward_edges: for each pair of stages (source, target), the values sent.
        saved: for each stage, the values that it saves.
    """

    def __init__(self, reading: Reading, assignment: Assignment) -> None:
        self._reading = reading
        self._stage = assignment.stage
        self._made: set[tuple[Node, int]] = set()
        self._made_in_backward: set[tuple[Node, int]] = set()
        self.forward_edges: dict[Edge, set[Node]] = {}
        self.backward_edges: dict[Edge, set[Node]] = {}
        self.saved: list[set[Node]] = [set() for _ in range(assignment.count)]

    def of_outputs(self, stage: int, outputs: Iterable[Node]) -> None:
        """Take in what a stage needs to return values of the forward pass."""
        for node in outputs:
            self._forward(node, stage)

    def of_gradients(self, stage: int, gradients: Iterable[Node]) -> None:
        """Take in what a stage needs to return gradients."""
        for node in gradients:
            self._backward(node, stage)

    def _forward(self, node: Node, stage: int) -> None:
        """Note that the forward pass of a stage returns a value."""
        waiting = [(node, stage)]
        while waiting:
            node, stage = waiting.pop()
            if not self._reading.is_forward(node):  # free
                continue
            made = self._stage[node]
            if made != stage:
                assert made < stage, f"'{node.name}' of stage {made} is read by the forward pass of stage {stage}"
                waiting.append((self._send(self.forward_edges, node, made, stage), made))
            elif (node, stage) not in self._made:
                self._made.add((node, stage))
                waiting += [(source, stage) for source in node.all_input_nodes]

    def _send(self, edges: dict[Edge, set[Node]], node: Node, source: int, target: int) -> Node:
        root = self._reading.root(node)
        if self._stage[root] != source:
            root = node
        edges.setdefault((source, target), set()).add(root)
        return root

    def _backward(self, node: Node, stage: int) -> None:
        """Note that the backward pass of a stage reads a value, or returns it."""
        waiting = [(node, stage)]
        while waiting:
            node, stage = waiting.pop()
            made = self._stage.get(node, stage)
            if not is_call(node):
                continue
            if self._reading.is_gradient(node) and made != stage:
                assert made > stage, f"'{node.name}' of stage {made} is read by the backward pass of stage {stage}"
                waiting.append((self._send(self.backward_edges, node, made, stage), made))
            elif not self._reading.is_gradient(node) and not self._is_made_again(node, stage):
                self._keep(node, stage)
            elif (node, stage) not in self._made_in_backward:
                self._made_in_backward.add((node, stage))
                waiting += [(source, stage) for source in node.all_input_nodes]

    def _is_made_again(self, node: Node, stage: int) -> bool:
        """Whether the backward pass of a stage makes a value again instead of keeping it."""
        if self._reading.is_again(node):
            return True
        marked = bool(node.meta.get("rematerialize")) and not is_random(node)
        if self._reading.is_forward(node):
            return marked and self._stage[node] == stage
        cast = bool(self._reading.parameters_of(node)) and is_light(node) and isinstance(node.target, OpOverload)
        return marked or cast or is_cheap(node) or not node.all_input_nodes

    def _keep(self, node: Node, stage: int) -> None:
        made = self._stage.get(node, stage)
        if made > stage:  # it is sent with the gradients
            self.backward_edges.setdefault((made, stage), set()).add(node)
            self.saved[made].add(node)
            self._forward(node, made)
        else:
            self.saved[stage].add(node)
            self._forward(node, stage)
