"""The noun of this room: a pure program with named inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node


class InputRole(Enum):
    """What a program reads."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    TANGENT = "tangent"


class OutputRole(Enum):
    """What a program computes."""

    LOSS = "loss"
    WEIGHT = "weight"
    GRADIENT = "gradient"
    BUFFER = "buffer"


@dataclass(frozen=True)
class Input:
    """An input: its role and the user's own name (`blocks.0.qkv.weight`, batch key or position)."""

    role: InputRole
    name: str


@dataclass(frozen=True)
class Output:
    """An output: its role and the name of the parameter or buffer that it belongs to."""

    role: OutputRole
    name: str


def holder(constants: Mapping[str, Tensor]) -> nn.Module:
    """Return a module that holds what the `get_attr` nodes of a graph read."""
    module = nn.Module()
    for name, value in constants.items():
        module.register_buffer(name, value, persistent=False)
    return module


@dataclass
class Program:
    """A captured step, forward and backward in one graph.

    Attributes:
        graph: ATen calls in execution order. Placeholders stand in the order of `inputs`, the output node's values in
            the order of `outputs`. `node.meta` holds `val` (fake tensor), `backward` (bool), `module` (path of the
            user's module), `rematerialize` (True inside `torch.utils.checkpoint`) and `sequence` (the number that
            autograd gives to what is differentiated as one: the same for a call and its backward calls; None where it
            is not known).
        inputs: what the placeholders are.
        outputs: what the outputs are; the loss is first, its weight second where there is one.
        constants: tensors that tracing lifted out of the user's code, by the name that `get_attr` nodes use.
        aliases: for each further name of a tied parameter or buffer, the name under which it is an input.
        weight: the weight of the mean that the loss is (the number of samples or valid tokens) where it does not depend
            on the data; None where it is an output of the program or unknown.
        training: False for a program without a backward pass.
    """

    graph: Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    weight: float | None = None
    training: bool = True

    def copy(self) -> Program:
        """Return an equal program with a graph of its own, to be changed in place."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        for node in self.graph.nodes:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
        return replace(self, graph=graph)

    def interpreter(self) -> Interpreter:
        """Return what runs the program node by node, without generating code for it."""
        found = Interpreter(holder(self.constants), graph=self.graph)
        found.extra_traceback = False
        return found

    @property
    def placeholders(self) -> list[Node]:
        """Input nodes, in the order of `inputs`."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def output_node(self) -> Node:
        """The single output node."""
        node: Node = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        return node

    @property
    def results(self) -> list[Node]:
        """Nodes of the output values, in the order of `outputs`."""
        values: Any = self.output_node.args[0]
        return list(values)
