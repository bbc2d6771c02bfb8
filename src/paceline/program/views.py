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
