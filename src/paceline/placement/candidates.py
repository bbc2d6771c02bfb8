"""Which splits may occur on each tensor, and which dimensions descend from the batch.

Both are found by passing splits along the rules, forwards and backwards, until nothing new appears.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch.fx import Node

from paceline.placement.calls import Ref
from paceline.placement.placements import Shard, divides
from paceline.placement.problem import Problem
from paceline.placement.rules import AxisRule, MapRule

_MOST_BLOCKS = 6
"""Block counts kept per dimension; fused projections need a few, more only slow the solver down."""
_MOST_SWEEPS = 12


class Candidates:
    """For each tensor the shards that may be considered, in a fixed order."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._blocks: dict[Ref, dict[int, list[int]]] = defaultdict(dict)
        for node in problem.nodes:
            for ref in problem.outputs(node):
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
        return [Shard(dim, blocks) for dim in sorted(dims) for blocks in sorted(dims[dim])]

    def _add(self, ref: Ref, shard: Shard) -> bool:
        if not divides(ref.shape, shard, self._problem.parts):
            return False
        blocks = self._blocks[ref].setdefault(shard.dim, [])
        if shard.blocks in blocks or len(blocks) >= _MOST_BLOCKS:
            return False
        blocks.append(shard.blocks)
        return True

    def _spread(self, node: Node) -> bool:
        rule = self._problem.rules[node]
        if isinstance(rule, MapRule):
            return self._spread_map(node, rule)
        return self._spread_axes(node, rule)

    def _spread_map(self, node: Node, rule: MapRule) -> bool:
        source, outputs = self._problem.inputs[node][0], self._problem.outputs(node)
        grown = False
        for shard in self.of(source):
            image = rule.forward(shard, self._problem.parts)
            if isinstance(image, Shard):
                grown |= any([self._add(ref, image) for ref in outputs])
        for ref in outputs:
            for shard in self.of(ref):
                image = rule.backward(shard, self._problem.parts)
                if isinstance(image, Shard):
                    grown |= self._add(source, image)
        return grown

    def _spread_axes(self, node: Node, rule: AxisRule) -> bool:
        parts = self._problem.parts
        outputs = self._problem.outputs(node)
        bound: dict[object, list[tuple[Ref, int]]] = defaultdict(list)
        for ref, labels in _labelled(self._problem, node, rule):
            for dim, label in enumerate(labels):
                if label in rule.split:
                    bound[label].append((ref, dim))
        grown = False
        for places in bound.values():
            every = sorted({b for ref, dim in places for b in self._blocks[ref].get(dim, ())})
            for blocks in every if len(places) > 1 else ():
                if all(divides(ref.shape, Shard(dim, blocks), parts) for ref, dim in places):
                    grown |= any([self._add(ref, Shard(dim, blocks)) for ref, dim in places])
        for strategy in rule.extra:
            pairs = [*zip(self._problem.inputs[node], strategy.inputs, strict=True)]
            pairs += [(ref, strategy.outputs[ref.index]) for ref in outputs]
            grown |= any([self._add(ref, p) for ref, p in pairs if isinstance(p, Shard)])
        return grown


def _labelled(problem: Problem, node: Node, rule: AxisRule) -> Iterable[tuple[Ref, tuple[object, ...]]]:
    yield from zip(problem.inputs[node], rule.inputs, strict=True)
    for ref in problem.outputs(node):
        yield ref, rule.outputs[ref.index]


def descendants(problem: Problem, candidates: Candidates, seeds: dict[Node, int]) -> dict[Ref, set[int]]:
    """Return the dimensions of each tensor that descend from the given dimension of each seed placeholder."""
    marked: dict[Ref, set[int]] = defaultdict(set)
    for node, dim in seeds.items():
        marked[Ref(node, 0)].add(dim)
    for node in problem.nodes:
        if node.op != "call_function":
            continue
        rule, inputs = problem.rules[node], problem.inputs[node]
        if isinstance(rule, MapRule):
            for shard in candidates.of(inputs[0]):
                image = rule.forward(shard, problem.parts) if shard.dim in marked[inputs[0]] else None
                if isinstance(image, Shard):
                    for ref in problem.outputs(node):
                        marked[ref].add(image.dim)
        else:
            labels = {
                label
                for ref, axes in zip(inputs, rule.inputs, strict=True)
                for dim, label in enumerate(axes)
                if label is not None and dim in marked[ref]
            }
            for ref in problem.outputs(node):
                marked[ref] |= {dim for dim, label in enumerate(rule.outputs[ref.index]) if label in labels}
    return marked
