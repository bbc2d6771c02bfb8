"""What the solver finds is what trying everything finds, with and without a limit of memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from math import inf, prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from paceline.placement.calls import Ref
from paceline.placement.costs import Costs
from paceline.placement.dimensions import dimensions
from paceline.placement.edges import Edges
from paceline.placement.intents import intent_of
from paceline.placement.memory import held_by, held_bytes
from paceline.placement.merging import classes
from paceline.placement.model import Model
from paceline.placement.options import Option, options
from paceline.placement.placements import REPLICATE, Placement, Shard
from paceline.placement.problem import Problem
from paceline.placement.redistribute import can_redistribute
from paceline.placement.solver import solve
from paceline.plan import Axis
from paceline.program.capture import capture
from paceline.program.program import Program

COSTS = Costs(latency=60e-6)


class Weighted(nn.Module):
    """A weight and what is computed with it."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 32))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight)


def _softmax(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).softmax(-1).sum()


def _relu(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(x @ weight).sum()


def _twice(x: Tensor, weight: Tensor) -> Tensor:
    """The weight is read as it is and transposed."""
    return ((x @ weight) @ weight.t()).sum()


CASES = [("tp", _softmax), ("auto", _relu), ("fsdp", _twice)]


def problem_of(axis: str, program: Program) -> tuple[Problem, dict[Node, list[Option]]]:
    problem = Problem(program, axis, 2, dimensions(program))
    return problem, options(problem, intent_of(Axis(axis), split_batch=True), COSTS)


@pytest.mark.parametrize(("axis", "compute"), CASES, ids=[f"{axis}{compute.__name__}" for axis, compute in CASES])
def test_the_solver_finds_the_cheapest_of_all_placements(
    axis: str, compute: Callable[[Tensor, Tensor], Tensor]
) -> None:
    problem, choices = problem_of(axis, capture(Weighted(compute), (torch.randn(256, 64),)))
    tried = list(_everything(problem, choices))
    assert len(tried) > 20
    cheapest = min(tried, key=lambda found: found.cost)
    solution = solve(problem, choices, COSTS)
    assert solution.objective_s == pytest.approx(cheapest.cost, rel=2e-3)
    assert solution.bound_s <= cheapest.cost * (1 + 1e-6)
    assert _Placed(problem, {node: Option(s, 0) for node, s in solution.strategies.items()}).moves < inf
    limits = sorted({found.held for found in tried if found.cost < inf})
    binding = [limit for limit in limits if cheapest.held_with_copies > limit]
    assert binding or axis != "auto", "whole tensors are cheapest where messages are slow"
    for limit in limits:
        limited = solve(problem, choices, COSTS, limit)
        if limit not in binding:
            assert limited.objective_s == pytest.approx(solution.objective_s, rel=2e-3)
        else:
            best = min(found.cost_of_passes for found in tried if found.held <= limit * (1 + 1e-3))
            assert limited.regathers
            assert limited.objective_s == pytest.approx(best, rel=2e-3)
            held = held_bytes(problem)
            kept = sum(held_by(strategy, node, held, 2) for node, strategy in limited.strategies.items())
            assert kept <= limit * (1 + 2e-3)


class _Placed:
    """One choice for every node, and what it comes to."""

    def __init__(self, problem: Problem, chosen: dict[Node, Option]) -> None:
        self._problem = problem
        self._chosen = chosen
        held = held_bytes(problem)
        self.held = sum(held_by(option.strategy, node, held, 2) for node, option in chosen.items())
        self._wanted: dict[Ref, set[tuple[Placement, bool]]] = defaultdict(set)
        for node, option in chosen.items():
            for ref, placement in zip(problem.inputs.get(node, ()), option.strategy.inputs, strict=True):
                self._wanted[ref].add((placement, bool(node.meta.get("backward"))))
        for sink in problem.sinks:
            like = REPLICATE if sink.like is None else chosen[sink.like].strategy.outputs[0]
            self._wanted[sink.ref].add((like, sink.like is not None and bool(sink.like.meta.get("backward"))))
        work = sum(option.cost for option in chosen.values())
        self.moves = self._moves(lambda wants: {target for target, _ in wants})
        self.cost = work + self.moves
        self.cost_of_passes = work + self._moves(lambda wants: wants)

    @property
    def held_with_copies(self) -> float:
        """Bytes held when what both passes read whole is gathered once."""
        copies = 0
        for ref, wants in self._wanted.items():
            root = self._problem.root(ref)
            both = {(REPLICATE, False), (REPLICATE, True)} <= wants
            if both and isinstance(self._arrives(ref), Shard) and root.node.op == "call_function":
                copies += ref.bytes
        return self.held + copies

    def _arrives(self, ref: Ref) -> Placement:
        root = self._problem.root(ref)
        return self._problem.along_chain(ref, self._chosen[root.node].strategy.outputs[root.index])

    def _moves(self, conversions) -> float:  # type: ignore[no-untyped-def]
        total = 0.0
        for ref, wants in self._wanted.items():
            source = self._arrives(ref)
            for conversion in conversions(wants):
                target = conversion[0] if isinstance(conversion, tuple) else conversion
                if not can_redistribute(source, target):
                    return inf
                total += COSTS.redistribution(ref.bytes, source, target, 2)
        return total


def _everything(problem: Problem, choices: dict[Node, list[Option]]) -> Iterator[_Placed]:
    count = prod(len(found) for found in choices.values())
    assert count < 10_000, count
    for tried in itertools.product(*choices.values()):
        yield _Placed(problem, dict(zip(choices, tried, strict=True)))


def test_a_chain_that_cannot_carry_a_split_is_paid_for() -> None:
    """A view that mixes a split makes the tensor whole: that is a gather, though nobody asked for it by name."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).view(9, 16).relu().sum()

    problem, choices = problem_of("auto", capture(Mixed(), (torch.randn(36, 6),)))
    views = [node for node in problem.nodes if problem.follows(node)]
    broken = {
        (problem.root(Ref(node, 0)).node, placement): problem.broken(Ref(node, 0), placement)
        for node in views
        for option in choices[problem.root(Ref(node, 0)).node]
        for placement in option.strategy.outputs[:1]
    }
    assert any(found is not None for found in broken.values())
    node, placement = next(key for key, found in broken.items() if found is not None)
    class_of = classes(problem, choices)
    model = Model(problem, choices, Edges(problem, choices, class_of), class_of, COSTS)
    variables = model.chosen[class_of[node]]
    for variable, option in zip(variables, choices[node], strict=True):
        if option.strategy.outputs[0] == placement:
            gather = COSTS.redistribution(Ref(node, 0).bytes, placement, REPLICATE, 2)
            assert model.program.costs[variable] >= option.cost + gather * 0.99


def test_the_bound_holds_for_placements_that_merging_cannot_express() -> None:
    """Layers that look alike are solved as one, and still nothing is below the bound."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(8)))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x).square().mean()
            return out

    program = capture(Layers(), (torch.randn(64, 16),))
    for axis in ("tp", "auto"):
        problem, choices = problem_of(axis, program)
        exact = _optimum(problem, choices, {node: number for number, node in enumerate(problem.nodes)})
        for hops in (1, 2, 3):
            class_of = classes(problem, choices, hops)
            edges = Edges(problem, choices, class_of)
            assert len(set(class_of.values())) < len(problem.nodes)
            bound = Model(problem, choices, edges, edges.by_place(), COSTS).program.relaxed()
            assert 0.7 * exact < bound <= exact * (1 + 1e-6)
            assert exact <= _optimum(problem, choices, class_of) * (1 + 1e-3)
        assert exact * (1 - 1e-6) <= solve(problem, choices, COSTS).objective_s <= exact * (1 + 1e-2)


def _optimum(problem: Problem, choices: dict[Node, list[Option]], class_of: dict[Node, int]) -> float:
    found = Model(problem, choices, Edges(problem, choices, class_of), class_of, COSTS).program.solve()
    assert found is not None
    return found.objective
