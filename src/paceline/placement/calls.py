"""Reading an fx graph the way rules do: operator calls with shapes for tensors."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from paceline.placement.placements import Shape
from paceline.placement.rules.rule import Call, Input


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor in a graph: the node that makes it and which of the node's results it is."""

    node: Node
    index: int

    @property
    def value(self) -> Tensor:
        """The fake tensor."""
        value = self.node.meta["val"]
        tensor: Tensor = value[self.index] if isinstance(value, (list, tuple)) else value
        return tensor

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        return tuple(self.value.shape)

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.value.numel() * self.value.element_size()


def resolve(node: Node) -> Ref:
    """Look through `getitem` to the node that makes the tensor."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, Node) and isinstance(index, int)
        return Ref(source, index)
    return Ref(node, 0)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested lists, tuples and dictionaries, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def tensor_inputs(node: Node) -> list[Ref]:
    """Return the tensors that a call reads, in the order of its schema."""
    return [resolve(leaf) for leaf in leaves(arguments_by_name(node)) if isinstance(leaf, Node)]


def results(node: Node) -> list[Tensor | None]:
    """Return the fake results of a node; None where it returns no tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item if isinstance(item, Tensor) else None for item in values]


def arguments_by_name(node: Node) -> dict[str, Any]:
    """Return a call's arguments by schema name with defaults filled in; nodes stay nodes.

    Our own graph functions have no schema: their arguments are named by position.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(i): value for i, value in enumerate(node.args)} | dict(node.kwargs)
    named: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            named[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            named[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            named[argument.name] = argument.default_value
    return named


def call_of(node: Node) -> Call:
    """Return the call that rules see."""
    count = itertools.count()

    def mark(value: Any) -> Any:
        if isinstance(value, Node):
            return Input(next(count))
        if isinstance(value, (list, tuple)):
            return [mark(item) for item in value]
        return value

    inputs = tensor_inputs(node)
    outputs = results(node)
    return Call(
        target=node.target,
        arguments={name: mark(value) for name, value in arguments_by_name(node).items()},
        inputs=tuple(ref.shape for ref in inputs),
        dtypes=tuple(ref.value.dtype for ref in inputs),
        outputs=tuple(None if out is None else tuple(out.shape) for out in outputs),
        output_dtypes=tuple(None if out is None else out.dtype for out in outputs),
    )
