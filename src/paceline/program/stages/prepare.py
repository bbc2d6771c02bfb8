"""What a graph is rewritten to before it is cut; what it computes stays the same."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from paceline.program.program import InputRole, OutputRole, Program

aten = torch.ops.aten
_MASK = "output_mask"


def prepare(program: Program, *, split_masks: bool) -> tuple[Program, dict[str, Node]]:
    """Return a copy of a program to cut, and the copies of changed buffers in it, by name.

    Args:
        program: stays as it is.
        split_masks: let calls that make the gradients of an input and of parameters be two calls.
    """
    program = program.copy()
    copies = _copy_changed_buffers(program)
    if split_masks:
        _split_masks(program.graph)
    return program, copies


def _copy_changed_buffers(program: Program) -> dict[str, Node]:
    """Let readers of a buffer that the program changes read a copy of what it was.

    Other micro-batches change the buffer before the backward pass and later stages read it.
    """
    changed = {output.name for output in program.outputs if output.role is OutputRole.BUFFER}
    copies = {}
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    for item, node in zip(program.inputs, program.placeholders, strict=True):
        readers = sorted((user for user in node.users if user.op != "output"), key=order.__getitem__)
        if item.role is not InputRole.BUFFER or item.name not in changed or not readers:
            continue
        with program.graph.inserting_before(readers[0]):
            copy = program.graph.call_function(aten.clone.default, (node,))
        copy.meta = {
            "val": node.meta["val"],
            "backward": False,
            "module": readers[0].meta.get("module", ""),
            "rematerialize": False,
            "sequence": None,
        }
        for reader in readers:
            reader.replace_input_with(node, copy)
        copies[item.name] = copy
    return copies


def _split_masks(graph: Graph) -> None:
    for node in list(graph.nodes):
        position = _mask_position(node)
        if position is None:
            continue
        mask: Any = node.args[position]
        if not mask[0] or not any(mask[1:]):
            continue
        with graph.inserting_after(node):
            weights = graph.node_copy(node)
        _set_mask(weights, position, [False, *mask[1:]])
        _set_mask(node, position, [True] + [False] * (len(mask) - 1))
        for item in list(node.users):
            if item.target is operator.getitem and item.args[1] != 0:
                item.replace_input_with(node, weights)


def _mask_position(node: Node) -> int | None:
    """Return where a call of an operator that makes products says which gradients it makes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket not in flop_registry:
        return None
    names = [argument.name for argument in target._schema.arguments]
    return names.index(_MASK) if _MASK in names and names.index(_MASK) < len(node.args) else None


def _set_mask(node: Node, position: int, mask: list[bool]) -> None:
    node.update_arg(position, mask)
    value = node.meta["val"]
    node.meta = {**node.meta, "val": tuple(v if made else None for v, made in zip(value, mask, strict=True))}
