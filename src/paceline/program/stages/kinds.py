"""What kinds of calls the cutting of a graph tells apart."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from paceline.program.views import is_view

aten = torch.ops.aten
_CAST = aten._to_copy.default
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
}
_LINEAR = {_CAST, aten._unsafe_view.default, aten.clone.default, aten.sum.dim_IntList, aten.neg.default}


def is_call(node: Node) -> bool:
    """Whether a node computes something."""
    return node.op == "call_function"


def is_item(node: Node) -> bool:
    """Whether a node is one of the results of a call that has several."""
    return node.target is operator.getitem


def is_communication(node: Node) -> bool:
    """Whether a call is a plain function, which the runtime binds to an exchange between ranks."""
    return is_call(node) and not isinstance(node.target, torch._ops.OpOverload) and not is_item(node)


def is_reshape(node: Node) -> bool:
    """Whether a call gives all elements of its only tensor in another shape, and computes nothing."""
    return node.target in _RESHAPES


def is_light(node: Node) -> bool:
    """Whether a call of a parameter gives the parameter itself in another form: seen, cast or gathered otherwise."""
    return is_view(node) or is_reshape(node) or node.target is _CAST or is_communication(node)


def is_cheap(node: Node) -> bool:
    """Whether a value had better be made again than kept: it takes no time."""
    return is_view(node) or is_reshape(node)


def distributes(node: Node) -> bool:
    """Whether a call of a sum is the sum of the calls of its terms, with no other tensor beside."""
    one_tensor = len(node.all_input_nodes) == 1 and not is_item(node)
    return one_tensor and (node.target in _LINEAR or is_view(node) or is_communication(node))


def is_sum(node: Node) -> bool:
    """Whether a call adds two tensors."""
    return node.target is aten.add.Tensor and not node.kwargs and all(isinstance(arg, Node) for arg in node.args)


def tensors(value: Any) -> Iterable[Tensor]:
    """Yield the tensors that a node's value holds."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, Tensor):
            yield item


def bytes_of(node: Node) -> int:
    """Bytes of the elements of a node's value."""
    return sum(item.numel() * item.element_size() for item in tensors(node.meta.get("val")))
