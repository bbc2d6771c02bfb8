"""Precision: a captured program with all that it computes in float64.

Many modules compute parts in float32 whatever their own type is: norms and rotary tables of Hugging Face models. Such a
program cannot show more than float32's accuracy. Lifted, it can: equal to the last digits or wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from paceline.program.fake import evaluate, fake_mode
from paceline.program.program import Program

_LOWER = (torch.float32, torch.bfloat16, torch.float16)


def lift(program: Program) -> Program:
    """Return a copy of a program in which every lower floating-point type is float64; `program` stays as it is.

    Inputs, constants, casts, and the types that creations and reductions name are changed; operators, their order and
    their names are not, so the two programs can be compared node by node. Give it inputs in float64.
    """
    mode = fake_mode()
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in program.graph.nodes:
        copy = copies[node] = graph.node_copy(node, lambda source: copies[source])
        copy.args = map_aggregate(copy.args, _lifted_type)
        copy.kwargs = map_aggregate(copy.kwargs, _lifted_type)
        value = node.meta.get("val")
        if value is None:
            continue
        if node.op == "call_function":
            copy.meta["val"] = evaluate(copy, mode)
            if _creates_lower(copy):
                copy.kwargs = {**copy.kwargs, "dtype": torch.float64}
                copy.meta["val"] = evaluate(copy, mode)
        else:
            with mode:
                copy.meta["val"] = torch.empty_strided(
                    tuple(value.shape), value.stride(), dtype=_lifted_type(value.dtype), device=value.device
                )
    constants = {name: lifted_tensor(value) for name, value in program.constants.items()}
    return replace(program, graph=graph, constants=constants)


def lifted_tensor(tensor: Tensor) -> Tensor:
    """Return `tensor` in float64 where it holds floating-point numbers."""
    return tensor.double() if tensor.is_floating_point() else tensor


def _lifted_type(value: Any) -> Any:
    return torch.float64 if value in _LOWER and isinstance(value, torch.dtype) else value


def _creates_lower(node: Node) -> bool:
    """Whether a call makes a tensor of the default type, float32, because it was not told another."""
    value = node.meta["val"]
    if node.all_input_nodes or not isinstance(value, Tensor) or value.dtype not in _LOWER:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(argument.name == "dtype" for argument in schema.arguments)
