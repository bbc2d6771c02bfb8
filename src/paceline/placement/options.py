"""The strategies that each node may choose under an intent, with their costs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from paceline.errors import PlacementError
from paceline.placement.calls import Ref, results
from paceline.placement.candidates import Candidates, Splits, descendants
from paceline.placement.constraints import CONSTRAIN, check_pin, constraint_of
from paceline.placement.costs import Costs, matmul_flops
from paceline.placement.dimensions import Dimension
from paceline.placement.intents import Intent, allowed_input_placements, followed
from paceline.placement.placements import REPLICATE, Placement, Shard, divides
from paceline.placement.problem import Problem
from paceline.placement.redistribute import is_redistribution, redistribution_bytes, redistribution_of
from paceline.placement.rules import AxisRule, Strategy
from paceline.placement.rules.attention import causal_length
from paceline.placement.rules.attention_rows import RING
from paceline.placement.strategies import strategies
from paceline.program.program import Input, InputRole


@dataclass(frozen=True)
class Option:
    """A strategy of a node and its cost in seconds."""

    strategy: Strategy
    cost: float


def options(
    problem: Problem, intent: Intent, costs: Costs, pins: Mapping[Input, Placement] | None = None
) -> dict[Node, list[Option]]:
    """Return the options of every node that chooses, that is of all but structural ones.

    `pins` are what parameters must be.

    Raises:
        PlacementError: a pin or a constraint does not divide.
    """
    fixed = {node: pins[item] for node, item in problem.input_of.items() if pins and item in pins}
    splits = _followed(problem, intent)
    for node, placement in fixed.items():
        check_pin(problem.input_of[node], Ref(node, 0).shape, placement, problem.axis, problem.parts)
    wanted = {node: [placement] for node, placement in fixed.items() if isinstance(placement, Shard)}
    candidates = Candidates(problem, {**splits, **wanted})
    choice = _Choice(
        problem,
        intent,
        candidates,
        followed=descendants(problem, splits),
        avoided=descendants(problem, _along(problem, intent.avoid - intent.regions, candidates)),
        avoided_in_products=descendants(problem, _along(problem, intent.avoid, candidates)),
        costs=costs,
        splits=splits,
        fixed=fixed,
        working=_with_parameters(problem),
    )
    known: dict[Hashable, list[Option]] = {}
    found: dict[Node, list[Option]] = {}
    for node in problem.nodes:
        if not problem.follows(node):
            key = choice.key(node)
            if key not in known:
                known[key] = choice.of(node)
            found[node] = known[key]
    return found


def _followed(problem: Problem, intent: Intent) -> dict[Node, list[Shard]]:
    """How the batch inputs are split."""
    causal = {length for call in problem.calls.values() if (length := causal_length(call)) is not None}
    found = {
        node: followed(Ref(node, 0).shape, meaning, intent, problem.parts, causal)
        for node, meaning in problem.meanings.items()
    }
    return {node: shards for node, shards in found.items() if shards}


def _with_parameters(problem: Problem) -> set[Node]:
    """Nodes that compute with parameters; the others make masks, positions and labels."""
    found = {node for node, item in problem.input_of.items() if item.role in (InputRole.PARAMETER, InputRole.TANGENT)}
    for node in problem.nodes:
        if any(ref.node in found for ref in problem.inputs.get(node, ())):
            found.add(node)
    return found


def _along(problem: Problem, dimensions: frozenset[Dimension], candidates: Candidates) -> dict[Node, list[Shard]]:
    """Every split of the batch inputs along these dimensions."""
    return {
        node: [shard for shard in candidates.of(Ref(node, 0)) if meaning[shard.dim] in dimensions]
        for node, meaning in problem.meanings.items()
        if dimensions
    }


@dataclass(frozen=True)
class _Choice:
    """What the options of a node are read from."""

    problem: Problem
    intent: Intent
    candidates: Candidates
    followed: Splits
    avoided: Splits
    avoided_in_products: Splits
    costs: Costs
    splits: Mapping[Node, list[Shard]]
    fixed: Mapping[Node, Placement]
    working: set[Node]

    def key(self, node: Node) -> Hashable:
        """All that the options of a node depend on; nodes with equal keys share them."""
        if node.op != "call_function":
            return node
        return (
            self.problem.kinds[node],
            self.candidates.around(node),
            self.followed.around(node),
            self.avoided.around(node),
            self.avoided_in_products.around(node),
            node in self.working,
        )

    def of(self, node: Node) -> list[Option]:
        if node.op == "get_attr":
            return [Option(Strategy((), (REPLICATE,)), 0.0)]
        if node.op == "placeholder":
            return [
                Option(Strategy((), (placement,)), self._update(node, placement)) for placement in self._of_input(node)
            ]
        return [
            Option(strategy, _cost(self.problem, node, strategy, self.costs)) for strategy in self._strategies_of(node)
        ]

    def _update(self, node: Node, placement: Placement) -> float:
        """Cost of an optimizer's update of a parameter: a rank updates all that it holds."""
        if self.problem.input_of[node].role is not InputRole.PARAMETER or not self.problem.program.training:
            return 0.0
        share = self.problem.parts if isinstance(placement, Shard) else 1
        return self.costs.update(Ref(node, 0).bytes / share)

    def _of_input(self, node: Node) -> list[Placement]:
        if node in self.fixed:
            return [self.fixed[node]]
        if node in self.splits:
            return [*self.splits[node], *([REPLICATE] if self._may_be_whole(node) else [])]
        ref = Ref(node, 0)
        shards = list(self.candidates.of(ref))
        return allowed_input_placements(self.problem.input_of[node], ref.shape, shards, self.intent)

    def _may_be_whole(self, node: Node) -> bool:
        """Whether ranks that see the same samples may each keep a batch input whole, of which they compute a part.

        So may ids and masks: those that shift labels or widen a mask need them whole, and they are small.
        """
        return Dimension.BATCH not in self.intent.follow and not Ref(node, 0).value.is_floating_point()

    def _strategies_of(self, node: Node) -> list[Strategy]:
        inputs = self.problem.inputs[node]
        outputs = [Ref(node, i) for i in range(len(results(node)))]
        shards = [self.candidates.of(ref) for ref in (*inputs, *outputs)]
        found = strategies(self.problem.calls[node], self.problem.rules[node], shards, self.problem.parts)
        if node.target is CONSTRAIN:
            return _constrained(node, found, self.problem)
        if self.intent.whole:
            return found if is_redistribution(node) else found[:1]
        if self.intent.follow:
            # Where an operator can be split along what is followed it is. Where it cannot, the solver is free: it
            # draws a dropout mask whole and cuts it before the cast, and it casts a shard of a parameter before the
            # gather. So it is, too, with what is made of ids alone: a mask of tokens runs along keys as well as rows.
            if Dimension.BATCH not in self.intent.follow and node not in self.working:
                return found
            along = [s for s in found if _touches(s, inputs, outputs, self.followed)] or found
            rings = [s for s in along if self.intent.ring and s.label == RING]
            return rings or along
        is_product = matmul_flops(self.problem.calls[node]) > 0
        avoided = self.avoided_in_products if is_product else self.avoided
        return [s for s in found if not _touches(s, inputs, outputs, avoided)]


def _touches(strategy: Strategy, inputs: list[Ref], outputs: list[Ref], splits: Splits) -> bool:
    pairs = [*zip(inputs, strategy.inputs, strict=True), *zip(outputs, strategy.outputs, strict=True)]
    return any(placement in splits.of(ref) for ref, placement in pairs)


def _constrained(node: Node, found: list[Strategy], problem: Problem) -> list[Strategy]:
    """The one strategy that the user asks for along this axis, or all of them where none is asked for."""
    wanted = constraint_of(node, problem.axis)
    if wanted is None:
        return found
    if not divides(Ref(node, 0).shape, wanted, problem.parts):
        raise PlacementError(
            f"constrain({problem.axis}={wanted}) in '{node.meta.get('module', '')}': a tensor of shape "
            f"{list(Ref(node, 0).shape)} does not divide so over {problem.parts} ranks."
        )
    return [Strategy((wanted,), (wanted,))]


def _cost(problem: Problem, node: Node, strategy: Strategy, costs: Costs) -> float:
    if is_redistribution(node):
        x, source, target, _, parts = redistribution_of(node)
        nbytes = redistribution_bytes(x.meta["val"], source, parts)
        share = problem.parts if isinstance(strategy.inputs[0], Shard) else 1
        return costs.redistribution(nbytes // share, source, target, parts)
    cost = costs.operator(problem.calls[node], strategy.inputs, strategy.outputs, problem.parts)
    rule = problem.rules[node]
    written = rule.written.get(strategy.label) if isinstance(rule, AxisRule) else None
    for move in written.moves if written is not None else ():
        cost += costs.redistribution(move.nbytes, move.source, move.target, problem.parts)
    return cost
