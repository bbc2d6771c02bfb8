"""Tensors without data, with which shapes are computed. The only file that touches PyTorch's fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node
from torch.fx.node import map_arg


def fake_mode() -> FakeTensorMode:
    """Return a new mode; fake tensors of different modes do not mix."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def with_data() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which operators compute, inside of one in which they do not."""
    return unset_fake_temporarily()


def fake_mode_for(values: Iterable[object]) -> FakeTensorMode:
    """Return the mode of the fake tensors among `values`, or a new one where there are none."""
    found: FakeTensorMode | None = detect_fake_mode(list(values))
    return fake_mode() if found is None else found


def is_fake(value: object) -> bool:
    """Whether it is a tensor without data."""
    return isinstance(value, FakeTensor)


def mode_of(graph: Graph) -> FakeTensorMode:
    """Return the mode that the fake tensors in a graph belong to."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return fake_mode()


def evaluate(node: Node, mode: FakeTensorMode) -> Any:
    """Run a call node on the fake tensors of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]  # a call's target is a function


def own_values(graph: Graph) -> None:
    """Give each node a value of its own, which shares memory only with what it is a view of.

    In a placed graph values that are alike are one object.
    """
    mode = fake_mode()
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = evaluate(node, mode)
        elif node.op != "output":
            value = node.meta["val"]
            with mode:
                node.meta["val"] = torch.empty_strided(
                    tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device
                )


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors have in common if one is a view of the other, while they live."""
    key: int = tensor.untyped_storage()._cdata
    return key
