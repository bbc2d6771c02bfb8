"""What ties the classes of a merged problem together: tensors that equal nodes make and equal nodes read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch.fx import Node

from paceline.placement.calls import Ref
from paceline.placement.problem import Problem

Reader = tuple[int, int]
"""A class and an input slot; slot -1 reads what a program input is placed as, class -1 wants the tensor replicated."""
NOWHERE = -1
MAKER = -1
Place = tuple[int, int]
"""Where a node stands: the number of an edge, and which of its readers the node is, or `MAKER`."""


@dataclass
class Edge:
    """Equal tensors.

    Attributes:
        maker: class of the nodes that the chains of structural operators before the tensors start from.
        output: which of these nodes' results it is.
        ref: one of the tensors.
        readers: how many nodes of a class read one such tensor in a slot.
        count: how many tensors there are.
    """

    maker: int
    output: int
    ref: Ref
    readers: dict[Reader, int]
    count: int = 0


class Edges:
    """The edges of a problem whose nodes `class_of` has merged.

    Attributes:
        all: the edges.
        places: where each node stands, once for each tensor.
    """

    def __init__(self, problem: Problem, choosing: Collection[Node], class_of: Mapping[Node, int]) -> None:
        self.all: list[Edge] = []
        self.places: dict[Node, list[Place]] = {}
        self._class_of = class_of
        reading: dict[Ref, list[tuple[Node | None, int]]] = defaultdict(list)
        for node in choosing:
            self.places[node] = []
            for slot, ref in enumerate(problem.inputs.get(node, ())):
                reading[ref].append((node, slot))
        for sink in problem.sinks:
            reading[sink.ref].append((sink.like, -1))
        number_of: dict[tuple[object, ...], int] = {}
        for ref, found in reading.items():
            root = problem.root(ref)
            readers = dict(sorted(Counter(self._reader(node, slot) for node, slot in found).items()))
            key = (class_of[root.node], root.index, problem.chain(ref), *readers.items())
            number = number_of.setdefault(key, len(self.all))
            if number == len(self.all):
                self.all.append(Edge(class_of[root.node], root.index, ref, readers))
            self.all[number].count += 1
            self.places[root.node].append((number, MAKER))
            order = {reader: place for place, reader in enumerate(readers)}
            for reader, slot in found:
                if reader is not None:
                    self.places[reader].append((number, order[self._reader(reader, slot)]))

    def by_place(self) -> dict[Node, int]:
        """Return finer classes: nodes that stand at the same edges. They are numbered in the order of appearance."""
        numbers: dict[tuple[object, ...], int] = {}
        return {
            node: numbers.setdefault((self._class_of[node], *sorted(places)), len(numbers))
            for node, places in self.places.items()
        }

    def _reader(self, node: Node | None, slot: int) -> Reader:
        return (NOWHERE if node is None else self._class_of[node]), slot
