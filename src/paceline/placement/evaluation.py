"""Values of local calls: fake tensors, worked out once for all calls that are alike.

Running an operator on fake tensors takes longer than everything else that lowering does to it. Deep models repeat their
calls, so equal calls on equal pieces share their value; nobody writes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from paceline.placement.calls import frozen
from paceline.placement.placements import Placement, Shape, Shard, local_shape
from paceline.program.fake import evaluate, fake_mode


class Evaluator:
    """Makes the fake tensors of one graph."""

    def __init__(self) -> None:
        self._mode = fake_mode()
        self._tensors: dict[Hashable, Tensor] = {}
        self._calls: dict[Hashable, tuple[Any, list[Any]]] = {}

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function on fake tensors."""
        with self._mode:
            return self._shared(target(*args, **kwargs))

    def of(self, node: Node) -> Any:
        """Return the value of a call node whose arguments have values."""
        nodes: list[Node] = []
        arguments = frozen((node.args, node.kwargs), nodes)
        values = [argument.meta["val"] for argument in nodes]
        key = (node.target, arguments, tuple(map(id, values)))
        if key not in self._calls:
            # The values are kept with the result: while they live, nothing else has their identity.
            self._calls[key] = self._shared(evaluate(node, self._mode)), values
        return self._calls[key][0]

    def empty(self, like: Tensor, shape: Shape) -> Tensor:
        """Return a contiguous tensor of another shape."""
        return self._strided(like, shape, contiguous_strides(shape))

    def piece(self, like: Tensor, placement: Placement, parts: int) -> Tensor:
        """Return a piece of a tensor, with its strides where it is whole."""
        shape = tuple(like.shape)
        if isinstance(placement, Shard):
            return self.empty(like, local_shape(shape, placement, parts))
        return self._strided(like, shape, like.stride())

    def _strided(self, like: Tensor, shape: Shape, strides: tuple[int, ...]) -> Tensor:
        key = (shape, strides, like.dtype, like.device)
        if key not in self._tensors:
            with self._mode:
                self._tensors[key] = torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
        return self._tensors[key]

    def _shared(self, value: Any) -> Any:
        """Return a result with one object for all tensors that are alike, so that calls which read them are alike."""
        if isinstance(value, Tensor):
            return self._tensors.setdefault((tuple(value.shape), value.stride(), value.dtype, value.device), value)
        if isinstance(value, (list, tuple)):
            return type(value)([self._shared(item) for item in value])
        return value


def contiguous_strides(shape: Shape) -> Shape:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
