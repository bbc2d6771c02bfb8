"""Which splits may occur on each tensor, and which of them descend from the batch.

Both are found by passing splits along the rules, forwards and backwards, until nothing new appears.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from torch.fx import Node

from paceline.placement.calls import Ref, results
from paceline.placement.placements import Blocks, Shard, divides
from paceline.placement.problem import Problem
from paceline.placement.strategies import implied, seeds

_MOST_BLOCKS = 6
"""Block counts kept per dimension; fused projections need a few, more only slow the solver down."""
_MOST_SWEEPS = 12


class Candidates:
    """For each tensor the shards that may be considered, in a fixed order."""

    def __init__(self, problem: Problem, wanted: Mapping[Node, Collection[Shard]]) -> None:
        self._problem = problem
        self._blocks: dict[Ref, dict[int, list[Blocks]]] = defaultdict(dict)
        for node in problem.nodes:
            for ref in problem.outputs(node):
                for shard in wanted.get(node, ()):
                    self._add(ref, shard)
                for dim in range(len(ref.shape)):
                    self._add(ref, Shard(dim))
        for sweep in range(_MOST_SWEEPS):
            order = problem.nodes if sweep % 2 == 0 else reversed(problem.nodes)
            grown = [self._spread(node) for node in order if node.op == "call_function"]
            if not any(grown):
                break

    def of(self, ref: Ref) -> list[Shard]:
        """Shards of a tensor, ordered by dimension and blocks."""
        dims = self._blocks.get(ref, {})
        return sorted((Shard(dim, blocks) for dim, found in dims.items() for blocks in found), key=Shard.order)

    def _add(self, ref: Ref, shard: Shard) -> bool:
        if not divides(ref.shape, shard, self._problem.parts):
            return False
        blocks = self._blocks[ref].setdefault(shard.dim, [])
        if shard.blocks in blocks or len(blocks) >= _MOST_BLOCKS:
            return False
        blocks.append(shard.blocks)
        return True

    def _spread(self, node: Node) -> bool:
        """Carry the splits of each tensor of a call to its other tensors."""
        call, rule, parts = self._problem.calls[node], self._problem.rules[node], self._problem.parts
        tensors = tensors_of(self._problem, node)
        grown = any([self._add(tensors[slot], shard) for slot, shard in seeds(call, rule, parts)])
        for slot, ref in enumerate(tensors):
            for shard in self.of(ref):
                for other, image in implied(call, rule, slot, shard, parts):
                    grown |= self._add(tensors[other], image)
        return grown


def tensors_of(problem: Problem, node: Node) -> list[Ref]:
    """The tensors of a call, numbered as strategies number them: inputs first, then outputs."""
    return [*problem.inputs[node], *(Ref(node, index) for index in range(len(results(node))))]


def descendants(problem: Problem, seeds: Mapping[Node, Collection[Shard]]) -> dict[Ref, set[Shard]]:
    """Return the splits of each tensor that descend from a split of some placeholders.

    Splits are followed, not dimensions: flattened and unflattened again, the batch does not become the time axis.
    """
    descend: dict[Ref, set[Shard]] = defaultdict(set)
    for node, shards in seeds.items():
        descend[Ref(node, 0)].update(shards)
    for node in problem.nodes:
        if node.op != "call_function":
            continue
        call, rule = problem.calls[node], problem.rules[node]
        tensors, inputs = tensors_of(problem, node), problem.inputs[node]
        for slot, ref in enumerate(inputs):
            for shard in descend[ref]:
                for other, image in implied(call, rule, slot, shard, problem.parts):
                    if other >= len(inputs):
                        descend[tensors[other]].add(image)
    return descend
