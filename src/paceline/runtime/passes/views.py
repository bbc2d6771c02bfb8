"""Who sees the memory of a tensor."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from paceline.program.views import is_view


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


__all__ = ["is_fresh", "is_view"]
