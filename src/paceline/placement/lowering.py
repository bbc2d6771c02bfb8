"""Lowering along one mesh axis: operators on global tensors become operators on a rank's pieces.

Wherever a tensor is read with another placement than it was made with, a `redistribute` node appears. The result is
the same for every rank.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from paceline.placement.calls import Ref, arguments_by_name, results
from paceline.placement.costs import Costs
from paceline.placement.evaluation import Evaluator
from paceline.placement.local_calls import LocalCalls, check_shapes
from paceline.placement.origins import ORIGINS, origins_of
from paceline.placement.placements import (
    REPLICATE,
    Placement,
    local_shape,
)
from paceline.placement.problem import Problem
from paceline.placement.redistribute import Collective, can_redistribute, collective_of, redistribute
from paceline.placement.rules import AxisRule, Strategy, Written
from paceline.placement.solver import Solution
from paceline.placement.writer import Writer
from paceline.program.program import Input, InputRole, Program

aten = torch.ops.aten
_SMALL_BYTES = 16 << 10
"""Below this size a collective costs its latency."""


class _Lowering:
    def __init__(self, problem: Problem, solution: Solution, costs: Costs, *, regather: bool) -> None:
        self.problem = problem
        self.regather = regather
        self.solution = solution
        self.costs = costs
        self.graph = Graph()
        self.evaluator = Evaluator()
        self.calls = LocalCalls(problem, self.evaluator)
        self.maps: dict[tuple[int, Placement], Strategy] = {}
        # For each tensor of the old graph: the placements in which the new graph has it, first the one it is made in.
        self.have: dict[Ref, dict[Placement, Node]] = {}
        self.made: dict[Ref, Placement] = {}
        self.reading: Node | None = None

    def run(self) -> tuple[Graph, dict[Node, Placement]]:
        placed: dict[Node, Placement] = {}
        for node in self.problem.nodes:
            self.reading = node
            if node.op == "placeholder":
                placement = self.solution.strategies[node].outputs[0]
                new = self._copy_input(node, placement)
                placed[new] = placement
            elif node.op == "get_attr":
                self._copy_input(node, REPLICATE)
            elif self.problem.follows(node):
                self._lower_map(node, self._best_for_map(node))
            else:
                self._lower_call(node, self.solution.strategies[node])
        output = self.problem.program.output_node
        self.reading = output
        values = []
        for sink in self.problem.sinks:
            target = REPLICATE if sink.like is None else self.solution.strategies[sink.like].outputs[0]
            values.append(self.get(sink.ref, target))
        self.graph.output(tuple(values)).meta = dict(output.meta)
        self.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        return self.graph, placed

    def get(self, ref: Ref, target: Placement) -> Node:
        """Return the new node that holds `ref` placed as `target`, redistributing it where needed."""
        have = self.have[ref]
        if target in have:
            return have[target]
        if target == REPLICATE and self.problem.follows(ref.node) and self._better_at_root(self.problem.root(ref)):
            self._lower_map(ref.node, REPLICATE)
            return have[target]
        nbytes, parts = ref.bytes, self.problem.parts
        possible = [placement for placement in have if can_redistribute(placement, target)]
        source = min(possible, key=lambda placement: self.costs.redistribution(nbytes, placement, target, parts))
        have[target] = self._redistribute(have[source], source, target, ref)
        return have[target]

    def _better_at_root(self, root: Ref) -> bool:
        """Whether to replicate the root of a chain and view the whole, rather than replicate its views.

        So it is for parameters, whose pieces are contiguous, and for small tensors: one collective serves all views.
        """
        item = self.problem.input_of.get(root.node)
        is_parameter = item is not None and item.role is InputRole.PARAMETER
        return is_parameter or REPLICATE in self.have[root] or root.bytes <= _SMALL_BYTES

    def _redistribute(self, node: Node, source: Placement, target: Placement, ref: Ref) -> Node:
        arguments: tuple[Any, ...] = (node, source, target, self.problem.axis, self.problem.parts)
        new = self.graph.call_function(redistribute, arguments)
        assert self.reading is not None
        new.meta = {
            "val": self.evaluator.empty(node.meta["val"], local_shape(ref.shape, target, self.problem.parts)),
            "backward": self._is_for_backward(ref.node),
            "module": self.reading.meta.get("module") or ref.node.meta.get("module", ""),
            "rematerialize": self._is_made_again(ref.node, source, target),
            "sequence": self.reading.meta.get("sequence"),
            ORIGINS: (origins_of(ref.node)[ref.index].along(target),),
        }
        return new

    def _is_made_again(self, node: Node, source: Placement, target: Placement) -> bool:
        """Whether what is moved is moved again in the backward pass: where its maker and its reader are made again."""
        assert self.reading is not None
        both = bool(node.meta.get("rematerialize") and self.reading.meta.get("rematerialize"))
        return both or (self.regather and collective_of(source, target) is Collective.ALL_GATHER)

    def _is_for_backward(self, node: Node) -> bool:
        """Whether what is written now, a result of `node` or a way to read it, is for the backward pass."""
        assert self.reading is not None
        reader = node if self.reading.op == "output" else self.reading
        return bool(reader.meta.get("backward"))

    def _copy_input(self, node: Node, placement: Placement) -> Node:
        create = self.graph.placeholder if node.op == "placeholder" else self.graph.get_attr
        new = create(node.name if node.op == "placeholder" else str(node.target))
        (origin,) = origins_of(node)
        new.meta = {
            **node.meta,
            "val": self.evaluator.piece(node.meta["val"], placement, self.problem.parts),
            ORIGINS: (origin.along(placement),),
        }
        self.have[Ref(node, 0)] = {placement: new}
        self.made[Ref(node, 0)] = placement
        return new

    def _best_for_map(self, node: Node) -> Placement:
        """The placement of its input that a structural node takes: the one it is made in, unless it cannot carry it."""
        source = self.made[self.problem.inputs[node][0]]
        return REPLICATE if self.problem.carry(node, source) is None else source

    def _lower_map(self, node: Node, source: Placement) -> None:
        key = (self.problem.kinds[node], source)
        if key not in self.maps:
            out = self.problem.carry(node, source)
            assert out is not None
            self.maps[key] = Strategy((source,), (out,) * len(results(node)))
        self._emit(node, self.maps[key], fill=bool(self.have.get(Ref(node, 0))))

    def _lower_call(self, node: Node, strategy: Strategy) -> None:
        rule = self.problem.rules[node]
        written = rule.written.get(strategy.label) if isinstance(rule, AxisRule) else None
        if written is None:
            self._emit(node, strategy, fill=False)
        else:
            self._write(node, strategy, written)

    def _write(self, node: Node, strategy: Strategy, written: Written) -> None:
        """Let the rule write the strategy."""
        writer = Writer(self.graph, self.evaluator, self.problem.axis, self.problem.parts, dict(node.meta))
        made = written.write(writer, self._named(node, strategy), strategy)
        values = [None if new is None else new.meta["val"] for new in made]
        check_shapes(self.problem.calls[node], strategy, values, self.problem.parts)
        for index, (new, origin, placement) in enumerate(zip(made, origins_of(node), strategy.outputs, strict=True)):
            if new is not None:
                new.meta[ORIGINS] = (origin.along(placement),)
                self.have[Ref(node, index)] = {placement: new}
                self.made[Ref(node, index)] = placement

    def _named(self, node: Node, strategy: Strategy) -> dict[str, Any]:
        """Return the arguments of a call by name, with new nodes that hold its inputs as the strategy wants them."""
        reads = iter([self.get(r, p) for r, p in zip(self.problem.inputs[node], strategy.inputs, strict=True)])

        def substitute(value: Any) -> Any:
            if isinstance(value, Node):
                return next(reads)
            if isinstance(value, (list, tuple)):
                return [substitute(item) for item in value]
            return value

        return {name: substitute(value) for name, value in arguments_by_name(node).items()}

    def _emit(self, node: Node, strategy: Strategy, *, fill: bool) -> None:
        """Write the local call. `fill` adds a further placement of results that exist already."""
        reads = [self.get(r, p) for r, p in zip(self.problem.inputs[node], strategy.inputs, strict=True)]
        call = self.calls.of(node, strategy, [read.meta["val"] for read in reads])
        new = call.append(self.graph, reads)
        origins = tuple(origin.along(p) for origin, p in zip(origins_of(node), strategy.outputs, strict=True))
        new.meta.update(node.meta)
        new.meta["val"], new.meta[ORIGINS] = call.value, origins
        new.meta["backward"] = self._is_for_backward(node)
        if fill:  # a view of what is gathered again is viewed again
            new.meta["rematerialize"] = self.regather or new.meta.get("rematerialize", False)
        for index, old in enumerate(results(node)):
            if old is None:
                continue
            made = new
            if isinstance(new.meta["val"], (list, tuple)):
                made = self.graph.call_function(operator.getitem, (new, index))
                made.meta = {**new.meta, "val": new.meta["val"][index], ORIGINS: origins[index : index + 1]}
            ref = Ref(node, index)
            if fill:
                self.have[ref].setdefault(strategy.outputs[index], made)
            else:
                self.have[ref] = {strategy.outputs[index]: made}
                self.made[ref] = strategy.outputs[index]


def lower(
    problem: Problem, solution: Solution, costs: Costs, *, regather: bool = False
) -> tuple[Program, dict[Input, Placement]]:
    """Return the local program and the placement of each of its inputs along the axis.

    With `regather`, what the forward pass gathers is gathered again in the backward pass instead of kept.

    Raises:
        PlacementError: a rule promised shapes that its operator does not give.
    """
    graph, placed = _Lowering(problem, solution, costs, regather=regather).run()
    program = replace(problem.program, graph=graph)
    return program, {item: placed[node] for item, node in zip(program.inputs, program.placeholders, strict=True)}
