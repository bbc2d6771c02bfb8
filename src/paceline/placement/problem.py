"""The placement problem of one mesh axis: a graph's operators, their rules, and where its results must end up."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from paceline.placement.calls import Kinds, Ref, resolve, results
from paceline.placement.dimensions import Dimensions
from paceline.placement.placements import REPLICATE, Placement, divides
from paceline.placement.redistribute import is_redistribution
from paceline.placement.rules import Call, MapRule, Rule, has_rule, rule_of
from paceline.program.program import Input, InputRole, OutputRole, Program


@dataclass(frozen=True)
class Sink:
    """An output of the program: the tensor, and the input whose placement it must have (None: replicated)."""

    ref: Ref
    like: Node | None


class Problem:
    """What candidates, options and the solver read. Nothing here depends on an intent.

    Attributes:
        parts: ranks on the axis.
        nodes: nodes that make tensors, in order (without `getitem`).
        kinds: a number for each operator node; nodes of one kind share their call and their rule.
        calls, rules, inputs: per operator node.
        tensors, shapes: the results of all nodes, in order; the shape of what is no tensor is None.
        slots: for each operator node, where the tensors that it reads and then those that it makes are in `tensors`.
        input_of: what each placeholder is.
        meanings: what the dimensions of each batch input mean.
        sinks: the program's outputs.
    """

    def __init__(self, program: Program, axis: str, parts: int, meanings: Mapping[Input, Dimensions]) -> None:
        self.program = program
        self.axis = axis
        self.parts = parts
        self.nodes = [node for node in program.graph.nodes if _makes_tensor(node)]
        catalogue = Kinds()
        self.kinds: dict[Node, int] = {}
        self.inputs: dict[Node, list[Ref]] = {}
        for node in self.nodes:
            if node.op == "call_function":
                self.kinds[node], self.inputs[node] = catalogue.of(node)
        rules = [rule_of(call) for call in catalogue.calls]
        self.calls: dict[Node, Call] = {node: catalogue.calls[kind] for node, kind in self.kinds.items()}
        self.rules: dict[Node, Rule] = {node: rules[kind] for node, kind in self.kinds.items()}
        self._carried: dict[tuple[int, Placement], Placement | None] = {}
        made = {node: catalogue.results(node) for node in self.nodes}
        self._chains: dict[Ref, int] = {}
        self._chain_numbers: dict[tuple[int, ...], int] = {}
        self.tensors = [Ref(node, index) for node, values in made.items() for index in range(len(values))]
        self.shapes = [None if value is None else value[0] for values in made.values() for value in values]
        self._number_of = {ref: number for number, ref in enumerate(self.tensors)}
        self.slots: dict[Node, tuple[int, ...]] = {}
        for node, inputs in self.inputs.items():
            first = self._number_of[Ref(node, 0)]
            self.slots[node] = (*[self._number_of[ref] for ref in inputs], *range(first, first + len(made[node])))
        self.input_of: dict[Node, Input] = dict(zip(program.placeholders, program.inputs, strict=True))
        self.meanings = {node: meanings[item] for node, item in self.input_of.items() if item in meanings}
        placeholder = {item: node for node, item in self.input_of.items()}
        likes = {
            OutputRole.GRADIENT: InputRole.PARAMETER,
            OutputRole.BUFFER: InputRole.BUFFER,
        }
        self.sinks = [
            Sink(resolve(node), placeholder[Input(likes[item.role], item.name)] if item.role in likes else None)
            for item, node in zip(program.outputs, program.results, strict=True)
        ]

    def number(self, ref: Ref) -> int:
        """Where a tensor is in `tensors`."""
        return self._number_of[ref]

    def outputs(self, node: Node) -> list[Ref]:
        """The tensors that a node makes."""
        return [Ref(node, i) for i, value in enumerate(results(node)) if value is not None]

    def unknown_operators(self) -> list[str]:
        """Operators without a rule, which are replicated."""
        return sorted({str(n.target) for n, c in self.calls.items() if c.inputs and not has_rule(n.target)})

    def follows(self, node: Node) -> bool:
        """Whether a node is structural: it costs nothing and takes whatever placement its input has."""
        return node.op == "call_function" and isinstance(self.rules[node], MapRule) and not is_redistribution(node)

    def root(self, ref: Ref) -> Ref:
        """The tensor that a chain of structural nodes starts from."""
        while self.follows(ref.node):
            ref = self.inputs[ref.node][0]
        return ref

    def carry(self, node: Node, placement: Placement) -> Placement | None:
        """Placement of a structural node's results when its input has `placement`; None where that cannot be."""
        key = (self.kinds[node], placement)
        if key not in self._carried:
            rule = self.rules[node]
            assert isinstance(rule, MapRule)
            out = rule.forward(placement, self.parts)
            fits = out is not None and all(divides(ref.shape, out, self.parts) for ref in self.outputs(node))
            self._carried[key] = out if fits else None
        return self._carried[key]

    def along_chain(self, ref: Ref, placement: Placement) -> Placement:
        """Placement of `ref` when the root of its chain has `placement`; replicated once the chain cannot carry it."""
        if not self.follows(ref.node):
            return placement
        out = self.carry(ref.node, self.along_chain(self.inputs[ref.node][0], placement))
        return REPLICATE if out is None else out

    def broken(self, ref: Ref, placement: Placement) -> tuple[Ref, Placement] | None:
        """The tensor on the chain to `ref` that must be replicated when its root has `placement`, and what it has."""
        if not self.follows(ref.node):
            return None
        before = self.inputs[ref.node][0]
        broken = self.broken(before, placement)
        if broken is not None:
            return broken
        arrived = self.along_chain(before, placement)
        return (before, arrived) if self.carry(ref.node, arrived) is None else None

    def chain(self, ref: Ref) -> int:
        """A number for the chain of structural operators that leads to a tensor; equal chains have equal numbers."""
        if ref not in self._chains:
            key = (
                (self.chain(self.inputs[ref.node][0]), self.kinds[ref.node], ref.index)
                if self.follows(ref.node)
                else ()
            )
            self._chains[ref] = self._chain_numbers.setdefault(key, len(self._chain_numbers))
        return self._chains[ref]


def _makes_tensor(node: Node) -> bool:
    if node.op == "output" or (node.op == "call_function" and node.target is operator.getitem):
        return False
    return node.meta.get("val") is not None
