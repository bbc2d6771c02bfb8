"""Which calls share memory with their input, by the operator's own schema: free to repeat and to move."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node


def is_view(node: Node) -> bool:
    """Whether a result of the call may alias an input (`reshape` does, when it can)."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def is_fresh(node: Node) -> bool:
    """Whether nothing but its one reader sees the memory of a tensor, so that the reader may overwrite it."""
    if len(node.users) != 1:
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, Node)
        twins = [user for user in source.users if user.args[1] == node.args[1]]
        return len(twins) == 1 and isinstance(source.target, torch._ops.OpOverload) and not is_view(source)
    if is_view(node):
        return len(node.all_input_nodes) == 1 and is_fresh(node.all_input_nodes[0])
    return isinstance(node.target, torch._ops.OpOverload)
