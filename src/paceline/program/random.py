"""Which operators draw random numbers.

Draws are made by every rank with the same generator and in the same order, on the shape of the serial model, and then
cut: dropout masks are those of the serial model whatever the mesh.
"""

from __future__ import annotations

import torch
from torch.fx import Node


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers. Attention kernels do only when they drop out."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(given != 0.0)
    return True
