"""Choosing a strategy for every operator along one mesh axis, at the least modelled cost.

The choice is an integer program (`model`) over classes of equal nodes (`merging`), solved by HiGHS through SciPy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch.fx import Node

from paceline.errors import PlacementError
from paceline.placement.calls import Ref
from paceline.placement.costs import Costs
from paceline.placement.edges import Edges
from paceline.placement.memory import held_by, held_bytes
from paceline.placement.merging import classes
from paceline.placement.model import Model, Options
from paceline.placement.placements import REPLICATE, Shard
from paceline.placement.problem import Problem
from paceline.placement.rules import Strategy

_HOPS = (3, 6, 12)
"""How far apart nodes of one class look alike, at first and then where that loses too much."""
_LOSS = 5e-3
_MANY_VARIABLES = 5000
_SLACK = 1e-3
"""Part of a limit of memory by which a placement may exceed it."""


@dataclass(frozen=True)
class Solution:
    """A strategy for each node that chooses.

    Attributes:
        strategies: the choice of every node except structural ones.
        objective_s: modelled cost per step in seconds.
        bound_s: proven lower bound of that cost, were every node free to choose for itself.
        classes: number of classes of nodes that were solved.
        variables: number of variables of the integer program.
        regathers: what the forward pass gathers is gathered again in the backward pass, instead of being kept.
    """

    strategies: dict[Node, Strategy]
    objective_s: float
    bound_s: float
    classes: int
    variables: int
    regathers: bool = False


def solve(problem: Problem, options: Options, costs: Costs, memory_bytes: float | None = None) -> Solution:
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
    solution = _best(problem, options, costs, None)
    if memory_bytes is None or _held(problem, solution.strategies) <= memory_bytes * (1 + _SLACK):
        return solution
    return _best(problem, options, costs, memory_bytes * (1 + _SLACK))


def _best(problem: Problem, options: Options, costs: Costs, limit: float | None) -> Solution:
    """Solve with ever finer classes until merging is known to lose little, or the program becomes large."""
    best: Solution | None = None
    for hops in _HOPS:
        found = _solved(problem, options, classes(problem, options, hops), costs, limit)
        if best is not None:
            bound = max(best.bound_s, found.bound_s)
            found = replace(min(found, best, key=lambda solution: solution.objective_s), bound_s=bound)
        best = found
        if best.objective_s <= best.bound_s * (1 + _LOSS) or best.variables > _MANY_VARIABLES:
            break
    assert best is not None
    return best


def _solved(
    problem: Problem,
    options: Options,
    class_of: Mapping[Node, int],
    costs: Costs,
    limit: float | None,
) -> Solution:
    edges = Edges(problem, options, class_of)
    model = Model(problem, options, edges, class_of, costs, limit)
    found = model.program.solve()
    if found is None:
        raise _impossible(problem, Model(problem, options, edges, class_of, costs), limit)
    free = Model(problem, options, edges, edges.by_place(), costs, limit)
    strategies: dict[Node, Strategy] = {}
    for group, nodes in model.members.items():
        best = int(np.argmax(found.values[model.chosen[group]]))
        for node in nodes:
            strategies[node] = options[node][best].strategy
    return Solution(
        strategies,
        objective_s=found.objective,
        bound_s=min(found.bound, free.program.relaxed()),
        classes=len(model.members),
        variables=len(model.program.costs),
        regathers=limit is not None,
    )


def _held(problem: Problem, strategies: Mapping[Node, Strategy]) -> float:
    """Return the bytes that a rank holds when what the forward pass gathers is kept for the backward pass."""
    held, parts = held_bytes(problem), problem.parts
    total = sum(held_by(strategy, node, held, parts) for node, strategy in strategies.items())
    whole: dict[Ref, set[bool]] = defaultdict(set)
    for node, strategy in strategies.items():
        for ref, placement in zip(problem.inputs.get(node, ()), strategy.inputs, strict=True):
            if placement == REPLICATE:
                whole[ref].add(bool(node.meta.get("backward")))
    for ref, passes in whole.items():
        root = problem.root(ref)
        made = problem.along_chain(ref, strategies[root.node].outputs[root.index])
        if len(passes) == 2 and isinstance(made, Shard) and root.node not in problem.input_of:
            total += ref.bytes
    return total


def _impossible(problem: Problem, model: Model, limit: float | None) -> PlacementError:
    least = model.program.least(model.held())
    if limit is None or least <= limit:
        return PlacementError("no placement satisfies the plan: what it asks for contradicts itself.")
    asked = limit / (1 + _SLACK)
    return PlacementError(
        f"no placement along '{problem.axis}' keeps what a rank holds within {asked:,.0f} bytes (of the ranks of later "
        f"axes together): parameters, gradients, optimizer state and saved values need at least {math.ceil(least):,} "
        "bytes. Raise memory_bytes, use more ranks, or recompute blocks (torch.utils.checkpoint)."
    )
