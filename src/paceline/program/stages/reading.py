"""A joint graph as it is read for cutting: which calls belong to a place, and which any stage may repeat."""

from __future__ import annotations

from functools import cached_property

from torch.fx import Node

from paceline.program.program import Input, InputRole, Output, OutputRole, Program
from paceline.program.random import is_random
from paceline.program.stages.kinds import bytes_of, is_call, is_light, is_reshape
from paceline.program.stages.seconds import is_heavy

_MOST = 48
"""Calls that a value of the batch may take which every stage makes for itself."""


class Reading:
    """What kinds of values a program has.

    A *forward* value comes before the loss; a *gradient* depends on the tangent. Both are made in one place. *Free* are
    values that every stage makes for itself: parameters in another form, and what little is made of the batch and of
    constants, such as masks, positions and rotary tables. *Again* are values of the backward pass that depend on no
    tangent: made wherever they are read.

    Attributes:
        program: the program; it is changed by those who cut it.
        input_of: what the placeholders are.
        result_of: the node of each output.
        body: forward calls that are not free, in order.
        gradients: gradients, in order; random draws of the backward pass, which nobody may repeat, are among them.
        free: free values and the inputs they are made of.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.input_of: dict[Node, Input] = dict(zip(program.placeholders, program.inputs, strict=True))
        self.result_of: dict[Output, Node] = dict(zip(program.outputs, program.results, strict=True))
        nodes = list(program.graph.nodes)
        self.order = {node: place for place, node in enumerate(nodes)}
        calls = [node for node in nodes if is_call(node)]
        of_tangent = self._of_tangent(calls)
        forward = self._forward(calls, of_tangent)
        self._parameters: dict[Node, frozenset[str]] = {}
        self.free = self._free(nodes, forward)
        self.body = [node for node in calls if node in forward and node not in self.free]
        self.gradients = [node for node in calls if node in of_tangent or (node not in forward and is_random(node))]
        self._forward_values, self._of_gradients = set(self.body), set(self.gradients)

    def _of_tangent(self, calls: list[Node]) -> set[Node]:
        found = {node for node, item in self.input_of.items() if item.role is InputRole.TANGENT}
        for node in calls:
            if any(source in found for source in node.all_input_nodes):
                found.add(node)
        return found

    def _forward(self, calls: list[Node], of_tangent: set[Node]) -> set[Node]:
        """Return calls of the forward pass, and those that it needs in whatever pass they were traced."""
        roots = [node for output, node in self.result_of.items() if output.role is not OutputRole.GRADIENT]
        waiting = roots + [node for node in calls if not node.meta.get("backward")]
        found: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in found and node not in of_tangent and is_call(node):
                found.add(node)
                waiting += node.all_input_nodes
        return found

    def _free(self, nodes: list[Node], forward: set[Node]) -> set[Node]:
        changed = {output.name for output in self.result_of if output.role is OutputRole.BUFFER}
        losses = {node for output, node in self.result_of.items() if output.role is OutputRole.LOSS}
        made_of: dict[Node, frozenset[Node]] = {}  # the calls that a free value takes
        for node in nodes:
            item = self.input_of.get(node)
            if node.op == "get_attr":
                made_of[node] = frozenset()
            elif item is not None:
                is_changed = item.role is InputRole.BUFFER and item.name in changed
                if item.role is not InputRole.TANGENT and not is_changed:
                    made_of[node] = frozenset()
                if item.role is InputRole.PARAMETER:
                    self._parameters[node] = frozenset({item.name})
            elif node in forward and node not in losses and all(source in made_of for source in node.all_input_nodes):
                read = frozenset[str]().union(*map(self.parameters_of, node.all_input_nodes))
                takes = frozenset({node}).union(*(made_of[source] for source in node.all_input_nodes))
                if is_light(node) if read else len(takes) <= _MOST and not is_random(node) and not is_heavy(node):
                    made_of[node] = frozenset() if read else takes
                    self._parameters[node] = read
        return set(made_of)

    def is_forward(self, node: Node) -> bool:
        """Whether a node is a forward value that has a place."""
        return node in self._forward_values

    def is_gradient(self, node: Node) -> bool:
        """Whether a node is a gradient, or a random draw of the backward pass."""
        return node in self._of_gradients

    def is_again(self, node: Node) -> bool:
        """Whether a node is made in the backward pass wherever it is read."""
        return is_call(node) and not (self.is_forward(node) or self.is_gradient(node) or node in self.free)

    def parameters_of(self, node: Node) -> frozenset[str]:
        """Return the parameters that a free value is made of."""
        return self._parameters.get(node, frozenset())

    def add_gradient(self, node: Node) -> None:
        """Note a gradient that was written later."""
        self._of_gradients.add(node)
        self.gradients.append(node)
        self.order[node] = len(self.order)

    @cached_property
    def readers(self) -> dict[str, frozenset[Node]]:
        """For each parameter, the forward values that are made of it, whatever its form."""
        found: dict[str, set[Node]] = {}
        for node in self.body:
            for source in node.all_input_nodes:
                for name in self.parameters_of(source):
                    found.setdefault(name, set()).add(node)
        return {name: frozenset(nodes) for name, nodes in found.items()}

    @cached_property
    def sequences(self) -> dict[str, frozenset[int]]:
        """For each parameter, the sequences of the calls that read it, in whatever form."""
        found: dict[str, set[int | None]] = {}
        for name, readers in self.readers.items():
            found.setdefault(name, set()).update(node.meta.get("sequence") for node in readers)
        for node, names in self._parameters.items():
            for name in names:
                found.setdefault(name, set()).add(node.meta.get("sequence"))
        return {name: frozenset(n for n in numbers if n is not None) for name, numbers in found.items()}

    def root(self, node: Node) -> Node:
        """Return the value that is sent where `node` is asked for: what it is a reshape of, if that is no larger.

        So a value that is read in several shapes is sent once, and as its operator laid it out.
        """
        kind = self.is_forward if self.is_forward(node) else self.is_gradient
        while is_reshape(node):
            (source,) = node.all_input_nodes
            if not kind(source) or bytes_of(source) > bytes_of(node):
                break
            node = source
        return node
