"""Repeated blocks are solved once: nodes whose surroundings look alike share their choice.

Each node starts with a hash of its operator, arguments, shapes and options; a few rounds mix in those of its
neighbours. Nodes with equal hashes form a class.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.fx import Node

from paceline.placement.calls import arguments_by_name
from paceline.placement.options import Option
from paceline.placement.problem import Problem

_HOPS = 3


def classes(problem: Problem, options: dict[Node, list[Option]], hops: int = _HOPS) -> dict[Node, int]:
    """Return the class of each node; classes are numbered in the order in which they appear."""
    code = {node: hash(_signature(problem, node, options)) for node in problem.nodes}
    readers: dict[Node, list[tuple[Node, int, int]]] = defaultdict(list)
    for node, inputs in problem.inputs.items():
        for slot, ref in enumerate(inputs):
            readers[ref.node].append((node, ref.index, slot))
    likes: dict[Node, list[tuple[Node, int]]] = defaultdict(list)
    for sink in problem.sinks:
        if sink.like is not None:
            likes[sink.ref.node].append((sink.like, sink.ref.index))
            readers[sink.like].append((sink.ref.node, -1, sink.ref.index))
    for _ in range(hops):
        code = {
            node: hash(
                (
                    code[node],
                    tuple((code[ref.node], ref.index) for ref in problem.inputs.get(node, ())),
                    tuple(sorted((code[reader], index, slot) for reader, index, slot in readers[node])),
                    tuple(sorted((code[like], index) for like, index in likes[node])),
                )
            )
            for node in problem.nodes
        }
    number: dict[int, int] = {}
    return {node: number.setdefault(code[node], len(number)) for node in problem.nodes}


def _signature(problem: Problem, node: Node, options: dict[Node, list[Option]]) -> tuple[Any, ...]:
    shapes = tuple(ref.shape for ref in problem.outputs(node))
    strategies = tuple((o.strategy.inputs, o.strategy.outputs) for o in options.get(node, ()))
    if node.op == "placeholder":
        item = problem.input_of[node]
        return item.role.value, shapes, strategies
    if node.op == "get_attr":
        return node.target, shapes
    return str(node.target), _plain(arguments_by_name(node)), shapes, strategies


def _plain(value: Any) -> Any:
    if isinstance(value, Node):
        return "tensor"
    if isinstance(value, dict):
        return tuple((key, _plain(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    return str(value)
