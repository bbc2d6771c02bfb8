"""The stage of every value that has a place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from paceline.program.program import OutputRole
from paceline.program.stages.groups import Group
from paceline.program.stages.kinds import is_item
from paceline.program.stages.reading import Reading


@dataclass
class Assignment:
    """Stages of values, and of parameters.

    Attributes:
        count: the number of stages.
        stage: of each forward value and gradient.
        holders: for each parameter, the stages whose forward pass reads it.
    """

    count: int
    stage: dict[Node, int]
    holders: dict[str, frozenset[int]]


def assign(reading: Reading, groups: Sequence[Group], starts: Sequence[int]) -> Assignment:
    """Give every forward value the stage of its group, and every gradient its stage.

    A gradient is made where the forward call of its sequence is made, but never after what it needs: gradients flow to
    earlier stages only. One without a sequence stays at the latest stage that has the forward values that it needs.
    """
    stage: dict[Node, int] = {}
    for number, group in enumerate(groups):
        at = sum(start <= number for start in starts)
        stage.update((node, at) for node in group.nodes)
    holders = {name: frozenset(stage[node] for node in nodes) for name, nodes in reading.readers.items()}
    found = Assignment(len(starts) + 1, stage, holders)
    _Gradients(reading, found).run()
    return found


class _Gradients:
    def __init__(self, reading: Reading, assignment: Assignment) -> None:
        self._reading = reading
        self._stage = assignment.stage
        self._last = assignment.count - 1
        self._holders = assignment.holders
        self._at_sequence: dict[int | None, set[int]] = {}
        self._at_hand: dict[Node, set[int]] = {}
        for node in reading.body:
            if node.meta.get("sequence") is not None:
                self._at_sequence.setdefault(node.meta["sequence"], set()).add(self._stage[node])
            for value in (node, *node.all_input_nodes):
                self._at_hand.setdefault(value, set()).add(self._stage[node])
        self._only_for = _only_for(reading)

    def run(self) -> None:
        for node in self._reading.gradients:
            self._stage[node] = self._stage_of(node)

    def _stage_of(self, node: Node) -> int:
        if is_item(node) and self._reading.is_gradient(node.all_input_nodes[0]):
            return self._stage[node.all_input_nodes[0]]
        latest = min(
            (self._stage[source] for source in node.all_input_nodes if self._reading.is_gradient(source)),
            default=self._last,
        )
        possible = range(latest, -1, -1)
        values = list(self._forward_values(node))
        has_values = [stage for stage in possible if all(self._is_at_hand(value, stage) for value in values)]
        if not has_values:
            has_values = [min(latest, max(self._stage.get(value, 0) for value in values))]
        # From what matters most: that a stage has the parameter whose gradient it makes, then its sequence.
        holders = self._holders.get(self._only_for.get(node, ""))
        sequence = self._at_sequence.get(node.meta.get("sequence"))
        choices = list(possible)
        for wanted in (holders, sequence, has_values):
            choices = [stage for stage in choices if wanted is None or stage in wanted] or choices
        return choices[0]

    def _forward_values(self, node: Node) -> Iterable[Node]:
        """Yield the forward and free values that a node needs, through what is made again."""
        waiting, seen = list(node.all_input_nodes), set[Node]()
        while waiting:
            source = waiting.pop()
            if source in seen:
                continue
            seen.add(source)
            if self._reading.is_again(source):
                waiting += source.all_input_nodes
            elif not self._reading.is_gradient(source):
                yield source

    def _is_at_hand(self, value: Node, stage: int) -> bool:
        if self._reading.is_forward(value):
            return stage in self._at_hand[value]
        parameters = self._reading.parameters_of(value)
        return all(stage in self._holders.get(name, frozenset({stage})) for name in parameters)


def _only_for(reading: Reading) -> dict[Node, str]:
    """Return the nodes that lead to nothing but the gradient of one parameter, and its name."""
    leads: dict[Node, set[str]] = {}
    for output, node in reading.result_of.items():
        leads.setdefault(node, set()).add(output.name if output.role is OutputRole.GRADIENT else "")
    for node in reversed(reading.gradients):
        reached = leads.setdefault(node, set())
        for user in node.users:
            if reading.is_gradient(user) and len(reached) < 2:
                reached |= leads[user]
    return {node: next(iter(names)) for node, names in leads.items() if len(names) == 1}
