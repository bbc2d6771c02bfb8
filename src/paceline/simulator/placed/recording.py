"""What eager code computes, as a graph: so an optimizer's update is timed and weighed like a placed program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_NUMBER = torch.ops.aten._local_scalar_dense.default
_A_NUMBER = 0.5
_COMPUTING = ("aten", "paceline")
"""Namespaces of operators that compute; others note what is profiled, or ask where a tensor lies."""


def recorded(function: Callable[[], Any], inputs: Sequence[Tensor]) -> Graph:
    """Return the operators that a function calls, in order.

    Args:
        function: works on tensors without data, under their mode, and may change them in place.
        inputs: which of its tensors were there before; they become the placeholders. Others that were, such as counts
            of steps, are left out.
    """
    graph = Graph()
    recorder = _Recorder(graph)
    for number, value in enumerate(inputs):
        node = graph.placeholder(f"given_{number}")
        node.meta["val"] = value
        recorder.know(value, node)
    with recorder:
        function()
    graph.output(())
    return graph


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes each operator as a node. Numbers that are read off tensors without data are taken for a half."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._graph = graph
        self._nodes: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the number of one

    def know(self, value: Tensor, node: Node) -> None:
        """Remember the node that made a tensor, or changed it last."""
        self._nodes[id(value)] = node
        self._alive.append(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _NUMBER:
            return _A_NUMBER
        made = func(*args, **(kwargs or {}))
        if func.namespace not in _COMPUTING:
            return made
        found = pytree.tree_map_only(Tensor, lambda tensor: self._nodes.get(id(tensor)), (args, kwargs or {}))
        node = self._graph.call_function(func, *found)
        node.meta.update(val=made, module="", backward=False)
        for index, tensor in enumerate(pytree.tree_leaves(made)):
            if isinstance(tensor, Tensor):
                self.know(tensor, node if isinstance(made, Tensor) else self._item(node, index, tensor))
        return made

    def _item(self, node: Node, index: int, tensor: Tensor) -> Node:
        item = self._graph.call_function(operator.getitem, (node, index))
        item.meta.update(val=tensor, module="", backward=False)
        return item
