"""Repeated blocks are solved once: nodes whose surroundings look alike share their choice.

Each node starts with a colour for its kind of call and its options; a few rounds mix in the colours of its neighbours.
Nodes of one colour form a class. Colours are numbers in the order of appearance, so that classes are the same in every
process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from paceline.placement.options import Option
from paceline.placement.problem import Problem


def classes(problem: Problem, options: Mapping[Node, Sequence[Option]], hops: int = 3) -> dict[Node, int]:
    """Return the class of each node; classes are numbered in the order in which they appear."""
    nodes = problem.nodes
    position = {node: number for number, node in enumerate(nodes)}
    reads: list[list[tuple[int, int]]] = [[] for _ in nodes]
    readers: list[list[tuple[int, int, int]]] = [[] for _ in nodes]
    likes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for node, inputs in problem.inputs.items():
        reader = position[node]
        for slot, ref in enumerate(inputs):
            reads[reader].append((position[ref.node], ref.index))
            readers[position[ref.node]].append((reader, ref.index, slot))
    for sink in problem.sinks:
        if sink.like is not None:
            made, like = position[sink.ref.node], position[sink.like]
            likes[made].append((like, sink.ref.index))
            readers[like].append((made, -1, sink.ref.index))
    colours = _numbered(_signatures(problem, options))
    for _ in range(hops):
        colours = _numbered(
            (
                colour,
                tuple([(colours[made], index) for made, index in reads[number]]),
                tuple(sorted([(colours[reader], index, slot) for reader, index, slot in readers[number]])),
                tuple(sorted([(colours[like], index) for like, index in likes.get(number, ())])),
            )
            for number, colour in enumerate(colours)
        )
    return dict(zip(nodes, colours, strict=True))


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _signatures(problem: Problem, options: Mapping[Node, Sequence[Option]]) -> Iterable[Hashable]:
    lists: dict[int, int] = {}
    contents: dict[Any, int] = {}
    for node in problem.nodes:
        found = options.get(node, ())
        if id(found) not in lists:  # options are shared between nodes that are alike: most lists are known
            content = tuple([(o.strategy.inputs, o.strategy.outputs, o.strategy.label, o.cost) for o in found])
            lists[id(found)] = contents.setdefault(content, len(contents))
        number = lists[id(found)]
        if node.op == "placeholder":
            shapes = tuple([(ref.shape, ref.value.dtype) for ref in problem.outputs(node)])
            yield problem.input_of[node].role, shapes, number
        elif node.op == "get_attr":
            yield node.target, number
        else:
            yield problem.kinds[node], number, bool(node.meta.get("backward"))
