"""Reading an fx graph the way rules do: operator calls with shapes for tensors."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterator
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


class Kinds:
    """Calls that are alike, numbered in the order in which they appear.

    Deep models repeat themselves: what follows from the operator, its arguments and the shapes and types of its tensors
    is worked out once for each kind of call.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._numbers: dict[Hashable, int] = {}
        self._results: dict[Node, tuple[tuple[Shape, torch.dtype] | None, ...]] = {}

    def of(self, node: Node) -> tuple[int, list[Ref]]:
        """Return the number of a call, and the tensors that it reads."""
        nodes: list[Node] = []
        arguments = frozen(node.args, nodes)
        if node.kwargs:
            before = len(nodes)
            named = frozen(dict(node.kwargs), nodes)
            inputs = [resolve(n) for n in nodes] if len(nodes) == before else tensor_inputs(node)
        else:
            named, inputs = None, [resolve(n) for n in nodes]
        reads = tuple([self.results(ref.node)[ref.index] for ref in inputs])
        key = (node.target, arguments, named, reads, self.results(node))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.calls)
            self.calls.append(call_of(node))
        return number, inputs

    def results(self, node: Node) -> tuple[tuple[Shape, torch.dtype] | None, ...]:
        """Return shape and type of each result of a node; None where it returns no tensor."""
        made = self._results.get(node)
        if made is None:
            made = tuple([None if t is None else (tuple(t.shape), t.dtype) for t in results(node)])
            self._results[node] = made
        return made


def frozen(value: Any, nodes: list[Node]) -> Hashable:
    """Return an argument as a key that differs wherever the argument does; appends the nodes in it to `nodes`."""
    if isinstance(value, Node):
        nodes.append(value)
        return Node
    if isinstance(value, (list, tuple)):
        return tuple([frozen(item, nodes) for item in value])
    if isinstance(value, dict):
        return tuple([(name, frozen(item, nodes)) for name, item in value.items()])
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0, but no call is the same with one as with the other.
    return type(value), repr(value) if isinstance(value, (float, complex, slice)) else value
