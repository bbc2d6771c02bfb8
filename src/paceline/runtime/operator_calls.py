"""Calls of a placed graph as they are told apart on a machine: the operator, and all that its arguments are.

Two calls of one key take equally long, so one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

_COMMUNICATES = "_c10d_functional"


def is_timed(node: Node) -> bool:
    """Whether a node is a call of an operator that computes, so that it can be timed by itself."""
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and target.namespace != _COMMUNICATES
        and "val" in node.meta
    )


def key_of(node: Node) -> str:
    """Return the operator with the shape, strides and type of each tensor and every other argument, as text."""
    positional = [_text(argument) for argument in node.args]
    named = [f"{name}={_text(value)}" for name, value in sorted(node.kwargs.items())]
    return f"{node.target}({', '.join([*positional, *named])})"


def nbytes_of(value: Any) -> int:
    """Return the bytes of the elements that a node's value has."""
    if isinstance(value, (list, tuple)):
        return sum(map(nbytes_of, value))
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0


def arguments(node: Node, find: Callable[[Node], Any], device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with what `find` gives in the place of nodes.

    Tensors in lists that nobody knows, such as the counts of steps that an optimizer keeps, are ones.
    """
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    types = {argument.name: str(argument.type) for argument in target._schema.arguments}
    names = [argument.name for argument in target._schema.arguments]
    one = torch.ones((), device=device)

    def real(value: Any, kind: str) -> Any:
        if isinstance(value, Node):
            return find(value)
        if isinstance(value, (list, tuple)):
            found = [real(item, "") for item in value]
            return [one.clone() if item is None else item for item in found] if kind == "List[Tensor]" else found
        return value

    args = [real(value, types[name]) for name, value in zip(names, node.args, strict=False)]
    return args, {name: real(value, types[name]) for name, value in node.kwargs.items()}


def made_up(meta: Any, device: torch.device) -> Any:
    """Return real values like those that a node has: small numbers, and zeros where they are integers."""
    if isinstance(meta, (list, tuple)):
        return [made_up(item, device) for item in meta]
    if not hasattr(meta, "dtype"):
        return meta
    reach = 1 + sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride(), strict=True))
    room = 0 if meta.numel() == 0 else reach
    if meta.dtype.is_floating_point:
        # Numbers of the size of activations; denormal ones would take longer, and equal ones may take less.
        base = torch.empty(room, dtype=torch.float32, device=device).uniform_(0.01, 0.2).to(meta.dtype)
    else:
        base = torch.zeros(room, dtype=meta.dtype, device=device)
    return base.as_strided(meta.shape, meta.stride()) if room else base.reshape(meta.shape)


def _text(value: Any) -> str:
    if isinstance(value, Node):
        return _described(value.meta.get("val"))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def _described(meta: Any) -> str:
    if isinstance(meta, (list, tuple)):
        return f"({', '.join(map(_described, meta))})"
    if not hasattr(meta, "dtype"):
        return str(meta)
    dtype = str(meta.dtype).removeprefix("torch.")
    shape, strides = list(meta.shape), list(meta.stride())
    return f"{dtype}{shape}" if strides == _packed(shape) else f"{dtype}{shape}/{strides}"


def _packed(shape: Sequence[int]) -> list[int]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return strides[::-1]
