"""Which splits may occur on each tensor, and which of them descend from the batch.

Both are found by passing splits along the rules, forwards and backwards, until nothing new appears. Equal sets of
splits share a number, so that what a call does to the sets of its tensors is worked out once for all calls of its kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch.fx import Node

from paceline.placement.calls import Ref, results
from paceline.placement.placements import Shape, Shard, divides
from paceline.placement.problem import Problem
from paceline.placement.strategies import Slot, implied, seeds

_MOST_BLOCKS = 6
"""Block counts kept per dimension; fused projections need a few, more only slow the solver down."""
_MOST_SWEEPS = 12

Numbers = tuple[int, ...]


class Splits:
    """A set of splits for each tensor of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._sets: list[tuple[Shard, ...]] = [()]
        self._ordered: list[tuple[Shard, ...]] = [()]
        self._number_of: dict[tuple[Shard, ...], int] = {(): 0}
        self._at = [0] * len(problem.tensors)
        self._implied: dict[tuple[int, int, Shard], list[Slot]] = {}

    def of(self, ref: Ref) -> tuple[Shard, ...]:
        """Splits of a tensor, ordered by dimension and blocks."""
        return self._ordered[self._at[self._problem.number(ref)]]

    def around(self, node: Node) -> Numbers:
        """The numbers of the sets of a call's tensors, inputs first. Tensors with equal numbers have equal splits."""
        at = self._at
        return tuple([at[tensor] for tensor in self._problem.slots[node]])

    def _give(self, ref: Ref, splits: Iterable[Shard]) -> None:
        self._at[self._problem.number(ref)] = self._number(tuple(splits))

    def _number(self, splits: tuple[Shard, ...]) -> int:
        number = self._number_of.setdefault(splits, len(self._sets))
        if number == len(self._sets):
            self._sets.append(splits)
            self._ordered.append(tuple(sorted(splits, key=Shard.order)))
        return number

    def _implied_by(self, node: Node, slot: int, shard: Shard) -> list[Slot]:
        key = (self._problem.kinds[node], slot, shard)
        found = self._implied.get(key)
        if found is None:
            call, rule = self._problem.calls[node], self._problem.rules[node]
            found = self._implied[key] = implied(call, rule, slot, shard, self._problem.parts)
        return found


class Candidates(Splits):
    """For each tensor the splits that may be considered; `wanted` are more for the results of some nodes."""

    def __init__(self, problem: Problem, wanted: Mapping[Node, Collection[Shard]]) -> None:
        super().__init__(problem)
        self._same = {node: tuple([tensors.index(t) for t in tensors]) for node, tensors in problem.slots.items()}
        self._after: dict[tuple[int, Numbers, Numbers], Numbers] = {}
        plain = {shape: self._plain(shape) for shape in problem.shapes}
        self._at = [plain[shape] for shape in problem.shapes]
        for node, splits in wanted.items():
            shape = problem.shapes[problem.number(Ref(node, 0))] or ()
            self._give(Ref(node, 0), self._limited(shape, [*splits, *map(Shard, range(len(shape)))]))
        for sweep in range(_MOST_SWEEPS):
            order = problem.kinds if sweep % 2 == 0 else reversed(problem.kinds)
            grown = [self._spread(node) for node in order]
            if not any(grown):
                break

    def _spread(self, node: Node) -> bool:
        """Carry the splits of each tensor of a call to its other tensors."""
        before = self.around(node)
        key = (self._problem.kinds[node], self._same[node], before)
        after = self._after.get(key)
        if after is None:
            after = self._after[key] = self._grown(node, before)
        if after == before:
            return False
        for tensor, number in zip(self._problem.slots[node], after, strict=True):
            self._at[tensor] = number
        return True

    def _grown(self, node: Node, before: Numbers) -> Numbers:
        call, rule, parts = self._problem.calls[node], self._problem.rules[node], self._problem.parts
        shapes = [shape or () for shape in (*call.inputs, *call.outputs)]
        sets: list[list[Shard]] = []
        for slot, number in enumerate(before):
            same = self._same[node][slot]  # a tensor that is read twice is one
            sets.append(list(self._sets[number]) if same == slot else sets[same])
        for slot, shard in seeds(call, rule, parts):
            self._add(sets[slot], shapes[slot], shard)
        for slot, found in enumerate(sets):
            for shard in sorted(found, key=Shard.order):
                for other, image in self._implied_by(node, slot, shard):
                    self._add(sets[other], shapes[other], image)
        return tuple([self._number(tuple(found)) for found in sets])

    def _plain(self, shape: Shape | None) -> int:
        return self._number(tuple(self._limited(shape or (), map(Shard, range(len(shape or ()))))))

    def _limited(self, shape: Shape, splits: Iterable[Shard]) -> list[Shard]:
        found: list[Shard] = []
        for shard in splits:
            self._add(found, shape, shard)
        return found

    def _add(self, found: list[Shard], shape: Shape, shard: Shard) -> None:
        if shard in found or not divides(shape, shard, self._problem.parts):
            return
        if sum(other.dim == shard.dim for other in found) < _MOST_BLOCKS:
            found.append(shard)


class _Descendants(Splits):
    def __init__(self, problem: Problem, seeds: Mapping[Node, Collection[Shard]]) -> None:
        super().__init__(problem)
        for node, splits in seeds.items():
            self._give(Ref(node, 0), dict.fromkeys(splits))
        known: dict[tuple[int, Numbers], Numbers] = {}
        for node, tensors in problem.slots.items():
            count = len(problem.inputs[node])
            before = tuple([self._at[tensor] for tensor in tensors[:count]])
            if not any(before):
                continue
            key = problem.kinds[node], before
            if key not in known:
                known[key] = self._made(node, before)
            for tensor, number in zip(tensors[count:], known[key], strict=True):
                self._at[tensor] = number

    def _made(self, node: Node, before: Numbers) -> Numbers:
        made: list[dict[Shard, None]] = [{} for _ in results(node)]
        for slot, number in enumerate(before):
            for shard in self._sets[number]:
                for other, image in self._implied_by(node, slot, shard):
                    if other >= len(before):
                        made[other - len(before)][image] = None
        return tuple([self._number(tuple(splits)) for splits in made])


def descendants(problem: Problem, seeds: Mapping[Node, Collection[Shard]]) -> Splits:
    """Return the splits of each tensor that descend from a split of some placeholders.

    Splits are followed, not dimensions: flattened and unflattened again, the batch does not become the time axis.
    """
    return _Descendants(problem, seeds)
