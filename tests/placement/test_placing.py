"""Programs placed on meshes: what the axes ask for, what the solver makes of it, and what lowering writes down."""

from __future__ import annotations

import itertools
from collections import defaultdict
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from paceline.errors import PlacementError, PlanError
from paceline.placement.calls import Ref
from paceline.placement.costs import Costs
from paceline.placement.dimensions import dimensions
from paceline.placement.fitting import check_batch
from paceline.placement.intents import intent_of
from paceline.placement.lowering import lower
from paceline.placement.merging import classes
from paceline.placement.options import Option, options
from paceline.placement.place import PlacedProgram, place
from paceline.placement.placements import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from paceline.placement.problem import Problem
from paceline.placement.redistribute import can_redistribute, is_redistribution, redistribution_of
from paceline.placement.rules import Strategy
from paceline.placement.solver import solve
from paceline.plan import Axis, Mesh
from paceline.program.capture import capture
from paceline.program.program import Input, InputRole, Program
from tests.placement.captured import Gpt, _ids

BATCH = 18


class Mlp(nn.Module):
    """Parameters that divide by nothing, by 2, by 3, in their first or only in their second dimension."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.last = nn.Linear(6, 7)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (self.last(x) * self.scale - offset).square().mean()


def program(layers: int = 1, batch: int = BATCH) -> Program:
    return capture(Mlp(layers), (torch.randn(batch, 5), torch.randn(7)))


def placed(mesh: str, layers: int = 1) -> PlacedProgram:
    return place(program(layers), Mesh.parse(mesh))


def parameter(name: str) -> Input:
    return Input(InputRole.PARAMETER, name)


def test_dp_splits_the_batch_and_keeps_parameters() -> None:
    found = placed("dp=2").placements
    for item, (placement,) in found.items():
        is_batch = item == Input(InputRole.BATCH, "0")
        assert placement == (Shard(0) if is_batch else REPLICATE), item


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (2, {"first.weight": "S0", "first.bias": "S0", "last.weight": "S1", "last.bias": "R", "scale": "R"}),
        (3, {"first.weight": "S0", "first.bias": "S0", "last.weight": "S1", "last.bias": "R", "scale": "R"}),
        (6, {"first.weight": "S0", "first.bias": "S0", "last.weight": "S1", "last.bias": "R", "scale": "R"}),
    ],
)
def test_fsdp_splits_what_divides_along_the_first_dimension_that_does(ranks: int, expected: dict[str, str]) -> None:
    found = placed(f"fsdp={ranks}").placements
    assert {name: str(found[parameter(name)][0]) for name in expected} == expected
    assert found[Input(InputRole.BATCH, "0")] == (Shard(0),)
    assert found[Input(InputRole.BATCH, "1")] == (REPLICATE,), "no dimension of the batch"
    assert found[Input(InputRole.TANGENT, "loss")] == (REPLICATE,)


@pytest.mark.parametrize("mesh", ["dp=2,fsdp=3", "fsdp=3,dp=2"])
def test_hybrid_shards_compose(mesh: str) -> None:
    result = placed(mesh)
    axes = Mesh.parse(mesh).names
    along = dict(zip(axes, result.placements[parameter("first.weight")], strict=True))
    assert along == {"dp": REPLICATE, "fsdp": Shard(0)}
    assert result.placements[Input(InputRole.BATCH, "0")] == (Shard(0), Shard(0))
    local = dict(zip(result.program.inputs, result.program.placeholders, strict=True))
    assert tuple(local[parameter("first.weight")].meta["val"].shape) == (2, 5)
    assert tuple(local[Input(InputRole.BATCH, "0")].meta["val"].shape) == (3, 5)
    assert result.global_shape(parameter("first.weight")) == (6, 5)
    assert [report.axis for report in result.reports] == list(axes)


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "dp=2,fsdp=3"])
def test_every_product_works_on_its_part_of_the_batch(mesh: str) -> None:
    """Where parameters are replicated too, nothing but the intent keeps a product from being computed whole."""
    share = BATCH // Mesh.parse(mesh).size
    products = [
        node
        for node in placed(mesh).program.graph.nodes
        if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    ]
    assert len(products) == 3 + 5
    for node in products:
        shapes = [tuple(a.meta["val"].shape) for a in node.args if isinstance(a, Node) and a.meta["val"].ndim == 2]
        assert any(share in shape for shape in shapes) and not any(BATCH in shape for shape in shapes), shapes


def test_a_batch_that_is_not_split_is_computed_whole() -> None:
    result = place(program(batch=5), Mesh.parse("dp=2,fsdp=3"), split_batch=False)
    assert result.placements[Input(InputRole.BATCH, "0")] == (REPLICATE, REPLICATE)
    assert result.placements[parameter("first.weight")] == (REPLICATE, Shard(0))
    moves = [redistribution_of(n) for n in result.program.graph.nodes if is_redistribution(n)]
    assert not any(isinstance(source, Partial) for _, source, *_ in moves), "there is nothing to add up"


@pytest.mark.parametrize(
    ("batch", "mesh", "says"),
    [
        (
            10,
            "dp=4",
            r"10 does not divide over 4 ranks \(mesh dp=4\). Use a batch of 8 or 12, or a mesh of 1, 2, 5, 10",
        ),
        (3, "dp=2,fsdp=2", "Use a batch of 4, or a mesh of 1, 3 ranks"),
        (1, "fsdp=2", "Use a batch of 2, or a mesh of 1 ranks"),
    ],
)
def test_a_batch_that_does_not_divide_is_told_what_would(batch: int, mesh: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check_batch(batch, Mesh.parse(mesh))
    check_batch(12, Mesh.parse("dp=2,fsdp=2"))


def test_operators_without_a_rule_are_listed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.matrix_exp(self.linear(x).view(-1, 2, 2)).mean()

    result = place(capture(Model(), (torch.randn(4, 4),)), Mesh.parse("dp=2"))
    assert any("matrix_exp" in name for name in result.unknown_operators)
    assert placed("dp=2").unknown_operators == ()


def problem_of(axis: str, given: Program) -> tuple[Problem, dict[Node, list[Option]], Costs]:
    parts, costs = 2, Costs()
    problem = Problem(given, axis, parts, dimensions(given))
    return problem, options(problem, intent_of(Axis(axis), split_batch=True), costs), costs


@pytest.mark.parametrize("axis", ["dp", "fsdp"])
def test_the_objective_is_not_below_its_bound(axis: str) -> None:
    for given in (program(), capture(Gpt(), (_ids(),))):
        problem, choices, costs = problem_of(axis, given)
        found = solve(problem, choices, costs)
        assert 0 < found.bound_s <= found.objective_s * (1 + 1e-6)
        assert found.objective_s <= found.bound_s * (1 + 2e-3), "solved to the gap that was asked for"


@pytest.mark.parametrize("axis", ["dp", "fsdp"])
def test_the_solver_finds_what_trying_everything_finds(axis: str) -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(x @ self.weight, -1).square().mean()

    problem, choices, costs = problem_of(axis, capture(Tiny(), (torch.randn(BATCH, 4),)))
    assert len(set(classes(problem, choices).values())) == len(problem.nodes), "no two nodes share a choice"
    free = [node for node, found in choices.items() if len(found) > 1]
    assert 1 < prod(len(choices[node]) for node in free) < 20_000
    best = min(
        _cost(problem, dict(zip(free, tried, strict=True)), choices, costs)
        for tried in itertools.product(*(choices[node] for node in free))
    )
    assert solve(problem, choices, costs).objective_s == pytest.approx(best, rel=2e-3)


def _cost(problem: Problem, tried: dict[Node, Option], choices: dict[Node, list[Option]], costs: Costs) -> float:
    """Cost of one choice for every node; conversions of one tensor to one placement are paid once."""
    chosen = {node: tried.get(node, found[0]) for node, found in choices.items()}
    wanted: dict[Ref, set[Placement]] = defaultdict(set)
    for node, option in chosen.items():
        for ref, placement in zip(problem.inputs.get(node, ()), option.strategy.inputs, strict=True):
            wanted[ref].add(placement)
    for sink in problem.sinks:
        wanted[sink.ref].add(REPLICATE if sink.like is None else chosen[sink.like].strategy.outputs[0])
    total = sum(option.cost for option in chosen.values())
    for ref, targets in wanted.items():
        root = problem.root(ref)
        source = problem.along_chain(ref, chosen[root.node].strategy.outputs[root.index])
        for target in targets:
            if not can_redistribute(source, target):
                return float("inf")
            total += costs.redistribution(ref.bytes, source, target, problem.parts)
    return total


def test_equal_blocks_are_solved_once() -> None:
    counts = [placed("fsdp=2", layers).reports[0].classes for layers in (8, 12, 16)]
    assert counts[0] == counts[1] == counts[2]


def test_members_of_a_class_take_the_same_strategy() -> None:
    problem, choices, costs = problem_of("fsdp", program(12))
    number = classes(problem, choices)
    strategies = solve(problem, choices, costs).strategies
    shared: dict[int, set[Strategy]] = defaultdict(set)
    for node, strategy in strategies.items():
        shared[number[node]].add(strategy)
    assert max(map(len, shared.values())) == 1
    assert len(shared) < len(strategies) / 2


def test_constraints_that_contradict_each_other_are_said() -> None:
    problem, choices, costs = problem_of("dp", program())
    add = next(node for node in choices if node.target is torch.ops.aten.addmm.default)
    x = next(node for node, item in problem.input_of.items() if item.role is InputRole.BATCH)
    choices[add] = [Option(Strategy((PARTIAL, PARTIAL, REPLICATE), (PARTIAL,)), 0.0)]
    choices[x] = [Option(Strategy((), (Shard(0),)), 0.0)]  # a shard never becomes a partial sum
    with pytest.raises(PlacementError, match="no placement satisfies the plan"):
        solve(problem, choices, costs)


def test_a_rule_that_promises_wrong_shapes_is_caught() -> None:
    problem, choices, costs = problem_of("dp", program())
    solution = solve(problem, choices, costs)
    add = next(node for node in choices if node.target is torch.ops.aten.addmm.default)
    solution.strategies[add] = Strategy((REPLICATE, Shard(0), REPLICATE), (Shard(1),))
    with pytest.raises(PlacementError, match=r"the rule of aten.addmm.default is wrong.*a fault of Paceline"):
        lower(problem, solution, costs)


def test_a_tensor_is_redistributed_once_for_all_its_readers() -> None:
    graph = placed("fsdp=2", layers=3).program.graph
    moves = [node.args[:3] for node in graph.nodes if is_redistribution(node)]
    assert len(moves) == len(set(moves))


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "dp=2,fsdp=3"])
def test_redistributions_carry_the_pass_and_the_module_they_serve(mesh: str) -> None:
    graph = placed(mesh).program.graph
    backward = {node: bool(node.meta["backward"]) for node in graph.nodes if node.op == "call_function"}
    for node in graph.nodes:
        if is_redistribution(node):
            _, source, target, *_ = redistribution_of(node)
            if isinstance(source, Shard) and isinstance(target, Replicate) and not backward[node]:
                assert node.meta["module"] in ("first", "layers.0", "last", ""), node.meta
            assert not any(backward.get(before) and not backward[node] for before in node.all_input_nodes)
    graph.lint()
