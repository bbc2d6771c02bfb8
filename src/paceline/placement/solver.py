"""The integer program that chooses a strategy for every operator along one mesh axis.

Binary variables choose the strategy of each class of equal nodes. Between a tensor's producer and each consumer a
continuous flow leads from the placement that is made to the one that is read; its marginals equal the choices, so only
strategies are binary. Conversions of one tensor to one placement are shared by all its readers and paid once.
Structural operators are folded into their producers. Solved by HiGHS through SciPy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix
from torch.fx import Node

from paceline.errors import PlacementError
from paceline.placement.calls import Ref
from paceline.placement.costs import Costs
from paceline.placement.memory import held_by, held_bytes
from paceline.placement.merging import classes
from paceline.placement.options import Option
from paceline.placement.placements import REPLICATE, Placement
from paceline.placement.problem import Problem
from paceline.placement.redistribute import can_redistribute
from paceline.placement.rules import Strategy

_MICROSECONDS = 1e6
_GAP = 1e-3
_TIME_LIMIT_S = 60.0


@dataclass(frozen=True)
class Solution:
    """A strategy for each node that chooses.

    Attributes:
        strategies: the choice of every node except structural ones.
        objective_s: modelled cost per step in seconds.
        bound_s: proven lower bound of that cost.
        classes: number of classes of nodes that were solved.
        variables: number of variables of the integer program.
    """

    strategies: dict[Node, Strategy]
    objective_s: float
    bound_s: float
    classes: int
    variables: int


class _Model:
    """Rows and columns of the integer program while it is being written down."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.binary: list[int] = []
        self.rows: list[list[tuple[int, float]]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, cost: float, *, binary: bool = False) -> int:
        self.cost.append(cost)
        self.binary.append(int(binary))
        return len(self.cost) - 1

    def constrain(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        self.rows.append(terms)
        self.low.append(low)
        self.high.append(high)

    def limit(self, terms: list[tuple[int, float]], most: float, axis: str) -> None:
        """Keep a sum of choices within `most` bytes.

        Raises:
            PlacementError: nothing does.
        """
        cost, self.cost = self.cost, [0.0] * len(self.cost)
        for variable, nbytes in terms:
            self.cost[variable] = nbytes / _MICROSECONDS
        _, least, _ = self.solve()
        self.cost = cost
        if least * _MICROSECONDS > most * (1 + _GAP):
            raise PlacementError(
                f"no placement along '{axis}' keeps what a rank holds within {most:,.0f} bytes (of the ranks of later "
                f"axes together): parameters, gradients, optimizer state and saved values need at least "
                f"{math.ceil(least * _MICROSECONDS):,} bytes. Raise memory_bytes, or use more ranks."
            )
        self.constrain([(variable, nbytes / most) for variable, nbytes in terms], -math.inf, 1 + _GAP)

    def solve(self) -> tuple[np.ndarray, float, float]:
        entries = [(row, column, value) for row, terms in enumerate(self.rows) for column, value in terms]
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_matrix((values, (rows, columns)), shape=(len(self.rows), len(self.cost)))
        result = milp(
            np.array(self.cost) * _MICROSECONDS,
            constraints=LinearConstraint(matrix, self.low, self.high),
            integrality=self.binary,
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": _GAP, "time_limit": _TIME_LIMIT_S},
        )
        if result.x is None:
            raise PlacementError(f"no placement satisfies the plan: the solver says '{result.message}'")
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
        return result.x, result.fun / _MICROSECONDS, bound / _MICROSECONDS


def solve(
    problem: Problem, options: dict[Node, list[Option]], costs: Costs, memory_bytes: float | None = None
) -> Solution:
    """Choose a strategy for every node.

    Args:
        problem: what is placed.
        options: what each node may choose.
        costs: of redistributions; those of operators are in the options.
        memory_bytes: what a rank may hold between the passes, if that is limited; see `placement.memory`.

    Raises:
        PlacementError: the constraints of the plan contradict each other, or ask for more memory than there is; the
            message says how little would do.
    """
    model = _Model()
    class_of = classes(problem, options)
    members: dict[int, list[Node]] = defaultdict(list)
    for node in options:
        members[class_of[node]].append(node)
    chosen: dict[int, list[int]] = {}
    for number, nodes in members.items():
        first = nodes[0]
        chosen[number] = [model.variable(o.cost * len(nodes), binary=True) for o in options[first]]
        model.constrain([(variable, 1.0) for variable in chosen[number]], 1, 1)
    for edge in _edges(problem, options, class_of):
        _connect(model, problem, edge, options, chosen, members, costs)
    if memory_bytes is not None:
        model.limit(_memory(problem, options, chosen, members), memory_bytes, problem.axis)
    values, objective, bound = model.solve()
    strategies: dict[Node, Strategy] = {}
    for number, nodes in members.items():
        best = int(np.argmax([values[variable] for variable in chosen[number]]))
        for node in nodes:
            strategies[node] = options[node][best].strategy
    return Solution(strategies, objective, bound, len(members), len(model.cost))


def _memory(
    problem: Problem, options: dict[Node, list[Option]], chosen: dict[int, list[int]], members: dict[int, list[Node]]
) -> list[tuple[int, float]]:
    """The bytes that a rank holds, as a sum over choices."""
    held, terms = held_bytes(problem), list[tuple[int, float]]()
    for number, nodes in members.items():
        for variable, option in zip(chosen[number], options[nodes[0]], strict=True):
            nbytes = sum(held_by(option.strategy, node, held, problem.parts) for node in nodes)
            if nbytes:
                terms.append((variable, nbytes))
    return terms


@dataclass
class _Edge:
    """A tensor of some class, and the classes that read it. `count` equal tensors share it."""

    producer: int
    output: int
    ref: Ref
    readers: tuple[tuple[int, int], ...]
    """(class, input slot); slot -1 reads the placement that a program input has, class -1 wants it replicated."""
    count: int = 0


def _edges(problem: Problem, options: dict[Node, list[Option]], class_of: dict[Node, int]) -> list[_Edge]:
    readers: dict[Ref, set[tuple[int, int]]] = defaultdict(set)
    for node in options:
        for slot, ref in enumerate(problem.inputs.get(node, ())):
            readers[ref].add((class_of[node], slot))
    for sink in problem.sinks:
        readers[sink.ref].add((-1 if sink.like is None else class_of[sink.like], -1))
    edges: dict[tuple[object, ...], _Edge] = {}
    for ref, found in readers.items():
        root = problem.root(ref)
        key = (class_of[root.node], root.index, class_of[ref.node], ref.index, tuple(sorted(found)))
        edge = edges.setdefault(key, _Edge(class_of[root.node], root.index, ref, tuple(sorted(found))))
        edge.count += 1
    return list(edges.values())


def _connect(
    model: _Model,
    problem: Problem,
    edge: _Edge,
    options: dict[Node, list[Option]],
    chosen: dict[int, list[int]],
    members: dict[int, list[Node]],
    costs: Costs,
) -> None:
    made: dict[Placement, list[int]] = defaultdict(list)
    producer = members[edge.producer][0]
    for variable, option in zip(chosen[edge.producer], options[producer], strict=True):
        made[option.strategy.outputs[edge.output]].append(variable)
    arrives = {placement: problem.along_chain(edge.ref, placement) for placement in made}
    nbytes = edge.ref.bytes
    shared: dict[tuple[Placement, Placement], int] = {}
    for reader, slot in edge.readers:
        wanted: dict[Placement, list[int]] = defaultdict(list)
        if reader == -1:
            wanted[REPLICATE] = []
        else:
            for variable, option in zip(chosen[reader], options[members[reader][0]], strict=True):
                strategy = option.strategy
                wanted[strategy.outputs[0] if slot == -1 else strategy.inputs[slot]].append(variable)
        flows: dict[tuple[Placement, Placement], int] = {}
        for source in made:
            for target in wanted:
                if not can_redistribute(arrives[source], target):
                    continue
                cost = edge.count * costs.redistribution(
                    nbytes, arrives[source], target, problem.parts, itemsize=edge.ref.value.element_size()
                )
                alone = len(edge.readers) == 1
                flow = flows[source, target] = model.variable(cost if alone else 0.0)
                if cost > 0 and not alone:
                    if (source, target) not in shared:
                        shared[source, target] = model.variable(cost)
                    model.constrain([(shared[source, target], 1.0), (flow, -1.0)], 0, math.inf)
        for source, variables in made.items():
            out_of = [(flows[source, target], 1.0) for target in wanted if (source, target) in flows]
            model.constrain(out_of + [(v, -1.0) for v in variables], 0, 0)
        for target, variables in wanted.items():
            into = [(flows[source, target], 1.0) for source in made if (source, target) in flows]
            if variables:
                model.constrain(into + [(v, -1.0) for v in variables], 0, 0)
            else:
                model.constrain(into, 1, 1)
