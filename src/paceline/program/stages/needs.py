"""What stages send each other, and what each saves for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable

from torch._ops import OpOverload
from torch.fx import Node

from paceline.program.random import is_random
from paceline.program.stages.assign import Assignment
from paceline.program.stages.kinds import is_call, is_cheap, is_item, is_light
from paceline.program.stages.reading import Reading

Edge = tuple[int, int]


class Needs:
    """What the parts of each stage need.

    Attributes:
        saved: for each stage, the values that it saves.
    """

    def __init__(self, reading: Reading, assignment: Assignment) -> None:
        self._reading = reading
        self._stage = assignment.stage
        self._made: set[tuple[Node, int]] = set()
        self._made_in_backward: set[tuple[Node, int]] = set()
        self._to_later: dict[Node, set[int]] = {}
        self._to_earlier: dict[Node, set[int]] = {}
        self.saved: list[set[Node]] = [set() for _ in range(assignment.count)]

    def of_outputs(self, stage: int, outputs: Iterable[Node]) -> None:
        """Take in what a stage needs to return values of the forward pass."""
        for node in outputs:
            self._forward(node, stage)

    def of_gradients(self, stage: int, gradients: Iterable[Node]) -> None:
        """Take in what a stage needs to return gradients."""
        for node in gradients:
            self._backward(node, stage)

    @property
    def forward_edges(self) -> dict[Edge, set[Node]]:
        """For each pair of stages (source, target), the values sent in the forward pass."""
        return self._relayed(self._to_later, reverse=False)

    @property
    def backward_edges(self) -> dict[Edge, set[Node]]:
        """For each pair of stages (source, target), the values sent in the backward pass."""
        return self._relayed(self._to_earlier, reverse=True)

    def _relayed(self, targets: dict[Node, set[int]], *, reverse: bool) -> dict[Edge, set[Node]]:
        """A value that several stages read is passed on from one to the next: so few pairs of stages talk."""
        edges: dict[Edge, set[Node]] = {}
        for node, stages in targets.items():
            source = self._stage[node]
            for target in sorted(stages, reverse=reverse):
                edges.setdefault((source, target), set()).add(node)
                source = target
        return edges

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
                waiting.append((self._send(self._to_later, node, stage), made))
            elif (node, stage) not in self._made:
                self._made.add((node, stage))
                waiting += [(source, stage) for source in node.all_input_nodes]

    def _send(self, targets: dict[Node, set[int]], node: Node, stage: int) -> Node:
        """Note that a value is sent to a stage, and return what is sent for it."""
        root = self._reading.root(node)
        sent = root if self._stage[root] == self._stage[node] else node
        targets.setdefault(sent, set()).add(stage)
        return sent

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
                waiting.append((self._send(self._to_earlier, node, stage), made))
            elif not self._reading.is_gradient(node) and not self._is_made_again(node, stage):
                self._keep(node, stage)
            elif (node, stage) not in self._made_in_backward:
                self._made_in_backward.add((node, stage))
                waiting += [(source, stage) for source in node.all_input_nodes]

    def _is_made_again(self, node: Node, stage: int) -> bool:
        """Whether the backward pass of a stage makes a value again instead of keeping it."""
        if is_item(node):
            (node,) = node.all_input_nodes
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
            self._to_earlier.setdefault(node, set()).add(stage)
            self.saved[made].add(node)
            self._forward(node, made)
        else:
            self.saved[stage].add(node)
            self._forward(node, stage)
