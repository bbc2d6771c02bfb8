"""The integer program of one axis, written down for classes of equal nodes.

Binary variables choose the strategy of each class. Between a tensor's producer and each reader a continuous flow leads
from the placement that is made to the one that is read; its marginals equal the choices, so only strategies are binary.
Conversions of one tensor to one placement are shared by all its readers and paid once. Structural operators are folded
into their producers.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from torch.fx import Node

from paceline.placement.calls import Ref
from paceline.placement.costs import Costs
from paceline.placement.edges import MAKER, NOWHERE, Edge, Edges, Place
from paceline.placement.integer import IntegerProgram
from paceline.placement.memory import held_by, held_bytes
from paceline.placement.options import Option
from paceline.placement.placements import REPLICATE, Placement
from paceline.placement.problem import Problem
from paceline.placement.redistribute import can_redistribute

Options = Mapping[Node, Sequence[Option]]
Rows = dict[Placement, list[tuple[int, float]]]
"""For each placement, variables with the share of an edge's tensors that they speak for."""


class Model:
    """An integer program and what is in it.

    Nodes of one group share their variables. Groups may be the classes that edges know, or finer: then each tensor of
    an edge is made and read by the average of the groups that stand there.

    Attributes:
        program: the integer program.
        members: the nodes of each group.
        chosen: the variables of each group, one for each option of its nodes.
    """

    def __init__(
        self,
        problem: Problem,
        options: Options,
        edges: Edges,
        group_of: Mapping[Node, int],
        costs: Costs,
        limit: float | None = None,
    ) -> None:
        self.program = IntegerProgram()
        self.members: dict[int, list[Node]] = defaultdict(list)
        self.chosen: dict[int, list[int]] = {}
        self._problem = problem
        self._options = options
        self._edges = edges
        self._costs = costs
        self._regathers = limit is not None
        for node in options:
            self.members[group_of[node]].append(node)
        self._standing: dict[Place, Counter[int]] = defaultdict(Counter)
        for number, nodes in self.members.items():
            cost = [option.cost * len(nodes) for option in options[nodes[0]]]
            self.chosen[number] = [self.program.variable(each, whole=True) for each in cost]
            self.program.constrain([(variable, 1.0) for variable in self.chosen[number]], 1, 1)
            for node in nodes:
                for place in edges.places[node]:
                    self._standing[place][number] += 1
        for number, edge in enumerate(edges.all):
            self._connect(number, edge)
        self._charge_breaks()
        if costs.per_byte_held:
            for variable, nbytes in self.held():
                self.program.costs[variable] += costs.per_byte_held * nbytes
        if limit is not None:
            self.program.constrain([(variable, nbytes / limit) for variable, nbytes in self.held()], -math.inf, 1.0)

    def option_of(self, group: int) -> Sequence[Option]:
        """The options of the nodes of a group."""
        return self._options[self.members[group][0]]

    def held(self) -> list[tuple[int, float]]:
        """Return the bytes that a rank holds, as a sum over variables."""
        held, terms = held_bytes(self._problem), list[tuple[int, float]]()
        for group, nodes in self.members.items():
            for variable, option in zip(self.chosen[group], self.option_of(group), strict=True):
                nbytes = sum(held_by(option.strategy, node, held, self._problem.parts) for node in nodes)
                if nbytes:
                    terms.append((variable, nbytes))
        return terms

    def _connect(self, number: int, edge: Edge) -> None:
        """Let flows lead from what is made to what each reader reads."""
        made = self._made(number, edge)
        arrives = {placement: self._problem.along_chain(edge.ref, placement) for placement in made}
        shared: dict[tuple[Placement, Placement, bool], int] = {}
        for place, (reader, _) in enumerate(edge.readers):
            wanted = self._wanted(number, edge, place)
            in_backward = self._regathers and self._is_backward(number, place)
            into: dict[Placement, list[int]] = {target: [] for target in wanted}
            for source, makers in made.items():
                out_of = []
                for target in wanted:
                    if can_redistribute(arrives[source], target):
                        cost = edge.count * self._conversion(edge.ref, arrives[source], target)
                        flow = self._flow(edge, cost, (source, target, in_backward), shared)
                        out_of.append(flow)
                        into[target].append(flow)
                self._tie(out_of, makers, 0)
            for target, readers in wanted.items():
                self._tie(into[target], readers, int(reader == NOWHERE))

    def _made(self, number: int, edge: Edge) -> Rows:
        found: Rows = defaultdict(list)
        for group, times in self._standing[number, MAKER].items():
            for variable, option in zip(self.chosen[group], self.option_of(group), strict=True):
                found[option.strategy.outputs[edge.output]].append((variable, times / edge.count))
        return found

    def _wanted(self, number: int, edge: Edge, place: int) -> Rows:
        (reader, slot), nodes = list(edge.readers.items())[place]
        if reader == NOWHERE:
            return {REPLICATE: []}
        found: Rows = defaultdict(list)
        for group, times in self._standing[number, place].items():
            for variable, option in zip(self.chosen[group], self.option_of(group), strict=True):
                strategy = option.strategy
                placement = strategy.outputs[0] if slot == -1 else strategy.inputs[slot]
                found[placement].append((variable, times / (edge.count * nodes)))
        return found

    def _is_backward(self, number: int, place: int) -> bool:
        return any(self.members[group][0].meta.get("backward") for group in self._standing[number, place])

    def _conversion(self, ref: Ref, source: Placement, target: Placement) -> float:
        if source == target:
            return 0.0
        itemsize = ref.value.element_size()
        return self._costs.redistribution(ref.bytes, source, target, self._problem.parts, itemsize=itemsize)

    def _flow(
        self,
        edge: Edge,
        cost: float,
        conversion: tuple[Placement, Placement, bool],
        shared: dict[tuple[Placement, Placement, bool], int],
    ) -> int:
        """Add a flow whose cost is shared with the other readers of the tensor that need the same conversion."""
        if len(edge.readers) == 1 or cost == 0:
            return self.program.variable(cost)
        flow = self.program.variable(0.0)
        if conversion not in shared:
            shared[conversion] = self.program.variable(cost)
        self.program.constrain([(shared[conversion], 1.0), (flow, -1.0)], 0, math.inf)
        return flow

    def _tie(self, flows: list[int], choices: list[tuple[int, float]], fixed: int) -> None:
        """Let flows add up to what some choices come to, and `fixed`."""
        self.program.constrain(
            [*((flow, 1.0) for flow in flows), *((variable, -share) for variable, share in choices)], fixed, fixed
        )

    def _charge_breaks(self) -> None:
        """Charge choices that a chain of structural operators cannot carry on: there the tensor is replicated."""
        charged: dict[tuple[int, int, Placement, int], float] = {}
        for number, edge in enumerate(self._edges.all):
            for group, times in self._standing[number, MAKER].items():
                for placement in {option.strategy.outputs[edge.output]: None for option in self.option_of(group)}:
                    broken = self._problem.broken(edge.ref, placement)
                    if broken is not None:
                        at, arrived = broken
                        key = (group, edge.output, placement, self._problem.chain(at))
                        cost = times * self._conversion(at, arrived, REPLICATE)
                        charged[key] = max(charged.get(key, 0.0), cost)
        for (group, output, placement, _), cost in charged.items():
            for variable, option in zip(self.chosen[group], self.option_of(group), strict=True):
                if option.strategy.outputs[output] == placement:
                    self.program.costs[variable] += cost
