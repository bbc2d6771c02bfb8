"""The strategies that each node may choose under an intent, with their costs."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from paceline.placement.calls import Ref, results
from paceline.placement.candidates import Candidates, descendants
from paceline.placement.costs import Costs
from paceline.placement.intents import Intent, allowed_input_placements
from paceline.placement.placements import REPLICATE, Shard
from paceline.placement.problem import Problem
from paceline.placement.redistribute import is_redistribution, redistribution_bytes, redistribution_of
from paceline.placement.rules import Strategy
from paceline.placement.strategies import strategies
from paceline.program.program import InputRole


@dataclass(frozen=True)
class Option:
    """A strategy of a node and its cost in seconds."""

    strategy: Strategy
    cost: float


def options(problem: Problem, intent: Intent, batch: int, costs: Costs) -> dict[Node, list[Option]]:
    """Return the options of every node that chooses, that is of all but structural ones.

    `batch` is the size of the batch dimension of the batch inputs as this axis sees them.
    """
    candidates = Candidates(problem)
    split_inputs = {
        node: Shard(0)
        for node, item in problem.input_of.items()
        if intent.split_batch and item.role is InputRole.BATCH and tuple(node.meta["val"].shape)[:1] == (batch,)
    }
    follow = descendants(problem, split_inputs)
    return {
        node: _options_of(problem, node, candidates, follow, intent, batch, costs)
        for node in problem.nodes
        if not problem.follows(node)
    }


def _options_of(
    problem: Problem,
    node: Node,
    candidates: Candidates,
    follow: dict[Ref, set[Shard]],
    intent: Intent,
    batch: int,
    costs: Costs,
) -> list[Option]:
    if node.op == "get_attr":
        return [Option(Strategy((), (REPLICATE,)), 0.0)]
    if node.op == "placeholder":
        ref = Ref(node, 0)
        allowed = allowed_input_placements(problem.input_of[node], ref.shape, candidates.of(ref), batch, intent)
        return [Option(Strategy((), (placement,)), 0.0) for placement in allowed]
    call, inputs = problem.calls[node], problem.inputs[node]
    outputs = [Ref(node, i) for i in range(len(results(node)))]
    shards = [candidates.of(ref) for ref in (*inputs, *outputs)]
    found = strategies(call, problem.rules[node], shards, problem.parts)
    if intent.split_batch:
        pairs = [(strategy, _runs_along(strategy, inputs, outputs, follow)) for strategy in found]
        # Where an operator can be split along the batch it is. Where it cannot, the solver is free: it draws a dropout
        # mask whole and cuts it before the cast, and it casts a shard of a parameter before the gather.
        found = [strategy for strategy, along in pairs if along] or found
    else:
        found = found[:1] if not is_redistribution(node) else found
    return [Option(strategy, _cost(problem, node, strategy, costs)) for strategy in found]


def _runs_along(strategy: Strategy, inputs: list[Ref], outputs: list[Ref], follow: dict[Ref, set[Shard]]) -> bool:
    pairs = [*zip(inputs, strategy.inputs, strict=True), *zip(outputs, strategy.outputs, strict=True)]
    return any(p in follow.get(ref, ()) for ref, p in pairs)


def _cost(problem: Problem, node: Node, strategy: Strategy, costs: Costs) -> float:
    if is_redistribution(node):
        x, source, target, _, parts = redistribution_of(node)
        nbytes = redistribution_bytes(x.meta["val"], source, parts)
        share = problem.parts if isinstance(strategy.inputs[0], Shard) else 1
        return costs.redistribution(nbytes // share, source, target, parts)
    return costs.operator(problem.calls[node], strategy.inputs, strategy.outputs, problem.parts)
