"""What a call becomes on a rank's pieces, worked out once for all calls that are alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from paceline.errors import PlacementError
from paceline.placement.evaluation import Evaluator
from paceline.placement.placements import local_shape
from paceline.placement.problem import Problem
from paceline.placement.rules import Call, Strategy
from paceline.placement.rules.rule import Input

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class LocalCall:
    """A call on pieces without its tensors.

    Attributes:
        target: what is called.
        args, kwargs: its arguments; `Input(i)` stands for the tensor that the global call reads as number i.
        value: the fake result.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any

    def append(self, graph: Graph, tensors: Sequence[Node]) -> Node:
        """Append the call on `tensors` to a graph."""
        # Torch searches arguments given at creation for symbolic numbers, which takes longer than all the rest.
        node = graph.call_function(self.target)
        node.args = _filled(self.args, tensors)
        if self.kwargs:
            node.kwargs = _filled(self.kwargs, tensors)
        return node


class LocalCalls:
    """The local calls of one problem."""

    def __init__(self, problem: Problem, evaluator: Evaluator) -> None:
        self._problem = problem
        self._evaluator = evaluator
        self._known: dict[Hashable, tuple[LocalCall, Strategy, Sequence[Any]]] = {}

    def of(self, node: Node, strategy: Strategy, values: Sequence[Any]) -> LocalCall:
        """Return what a call becomes with a strategy when its pieces have these fake values.

        Raises:
            PlacementError: the strategy promises other shapes than the operator gives.
        """
        key = (self._problem.kinds[node], id(strategy), *map(id, values))
        if key not in self._known:
            # What the key names is kept: while it lives, nothing else has its identity.
            self._known[key] = self._make(node, strategy, values), strategy, values
        return self._known[key][0]

    def _make(self, node: Node, strategy: Strategy, values: Sequence[Any]) -> LocalCall:
        call, parts = self._problem.calls[node], self._problem.parts
        arguments = dict(call.arguments) | self._problem.rules[node].localize(dict(call.arguments), strategy, parts)
        args, kwargs = _arranged(call, arguments)
        # Pieces need not have the strides of the whole, on which `view` depends.
        target = aten.reshape.default if call.target in _VIEWS else call.target
        value = self._evaluator.call(target, _filled(args, values), _filled(kwargs, values))
        check_shapes(call, strategy, value if isinstance(value, (list, tuple)) else [value], parts)
        return LocalCall(target, args, kwargs, value)


def check_shapes(call: Call, strategy: Strategy, values: Sequence[Any], parts: int) -> None:
    """Check that the results of a local call have the shapes that its strategy promises.

    Raises:
        PlacementError: they have others.
    """
    got = [tuple(value.shape) if isinstance(value, Tensor) else None for value in values]
    want = [
        None if shape is None else local_shape(shape, placement, parts)
        for shape, placement in zip(call.outputs, strategy.outputs, strict=True)
    ]
    if got != want:
        raise PlacementError(
            f"the rule of {call.target} is wrong: with inputs {[str(p) for p in strategy.inputs]} it promises local "
            f"results {want} and the operator gives {got}. This is a fault of Paceline; please report it."
        )


def _filled(value: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(value, Input):
        return tensors[value.index]
    if isinstance(value, tuple):
        return tuple([_filled(item, tensors) for item in value])
    if isinstance(value, list):
        return [_filled(item, tensors) for item in value]
    if isinstance(value, dict):
        return {name: _filled(item, tensors) for name, item in value.items()}
    return value


def _arranged(call: Call, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Order arguments by schema: positional ones as a tuple, keyword-only ones as a dictionary.

    Functions that have no schema have positional arguments only.
    """
    if not isinstance(call.target, torch._ops.OpOverload):
        return tuple(arguments.values()), {}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in call.target._schema.arguments:
        if argument.name not in arguments:
            continue
        if argument.kwarg_only:
            if not argument.has_default_value() or arguments[argument.name] != argument.default_value:
                kwargs[argument.name] = arguments[argument.name]
        else:
            args.append(arguments[argument.name])
    return tuple(args), kwargs
