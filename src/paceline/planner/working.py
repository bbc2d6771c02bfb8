"""What a segment of a step needs for a while beside what it keeps: storages that come and go while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from paceline.placement.calls import results
from paceline.program.fake import own_values, storage_key
from paceline.program.program import Program


@dataclass(frozen=True)
class Working:
    """Memory at the worst moment of a segment.

    Attributes:
        nbytes: of what lives then and is not kept, less what was kept and is free again.
        largest: the node that made most of it; None where nothing comes and goes.
    """

    nbytes: int
    largest: str | None


class Storages:
    """The storages of a captured program: who makes them, who reads them last, and which are outputs.

    The program is used up.
    """

    def __init__(self, program: Program) -> None:
        own_values(program.graph)
        self._made: dict[str, list[int]] = defaultdict(list)
        self._freed: dict[str, list[int]] = defaultdict(list)
        self._bytes: dict[int, int] = {}
        last: dict[int, str] = {}
        given: set[int] = set()
        for node in program.graph.nodes:
            for value in results(node):
                if value is None:
                    continue
                key = storage_key(value)
                if node.op != "call_function":
                    given.add(key)
                elif key not in given:
                    if key not in self._bytes:
                        self._made[node.name].append(key)
                        self._bytes[key] = value.untyped_storage().nbytes()
                    last[key] = node.name
            for source in node.all_input_nodes:
                for value in results(source):
                    if value is not None and storage_key(value) in self._bytes:
                        last[storage_key(value)] = node.name
        for key, name in last.items():
            self._freed[name].append(key)
        self._outputs = set(self._freed[program.output_node.name])

    def working(self, nodes: Iterable[Node], kept: Sequence[str]) -> Working:
        """Return the worst moment of a segment.

        Args:
            nodes: its calls, in order.
            kept: names of those that make what is kept for the backward pass.
        """
        held = {key for name in kept for key in self._made[name]}
        total = sum(self._bytes[key] for key in held)
        live: set[int] = set()
        worst, passing, is_forward = 0, set[int](), True
        for node in nodes:
            if is_forward and node.meta.get("backward"):
                is_forward, live = False, live & held  # what it handed on is free by then
            live.update(key for key in self._made[node.name] if key not in self._outputs)
            level = sum(self._bytes[key] for key in live) - total
            if level > worst:
                worst, passing = level, live - held
            live.difference_update(self._freed[node.name])
        makers = {key: name for name, keys in self._made.items() for key in keys}
        largest = max(passing, key=self._bytes.__getitem__, default=None)
        return Working(worst, None if largest is None else makers[largest])
