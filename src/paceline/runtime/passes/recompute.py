"""Recomputation: values that the backward pass makes again instead of keeping them.

Serves two masters: operators inside `torch.utils.checkpoint`, and parameters gathered by `fsdp` under ZeRO stage 3.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from paceline.placement.placements import Replicate, Shard
from paceline.placement.redistribute import is_redistribution, redistribution_of
from paceline.program.program import InputRole, Program
from paceline.program.random import is_random
from paceline.runtime.passes.views import is_view

aten = torch.ops.aten


def regather_parameters(program: Program) -> None:
    """Mark gathered parameters (and casts and views of them) for recomputation: ZeRO stage 3."""
    shards = {
        node
        for item, node in zip(program.inputs, program.placeholders, strict=True)
        if item.role is InputRole.PARAMETER
    }
    gathered: set[Node] = set()
    for node in program.graph.nodes:
        if node.op != "call_function" or node.meta.get("backward"):
            continue
        source = node.args[0] if node.args else None
        if is_redistribution(node):
            _, before, after, _, _ = redistribution_of(node)
            if source in shards and isinstance(before, Shard) and isinstance(after, Replicate):
                gathered.add(node)
        elif source in shards and (is_view(node) or node.target is aten._to_copy.default):
            shards.add(node)
        elif source in gathered and is_view(node):
            gathered.add(node)
    for node in gathered:
        node.meta["rematerialize"] = True


def recompute_in_backward(graph: Graph) -> None:
    """Give backward nodes their own copies of the marked forward nodes that they read, made right before their use.

    Random draws are never repeated: their results are kept.
    """
    copies: dict[Node, Node] = {}

    def again(node: Node) -> Node:
        if not node.meta.get("rematerialize") or node.meta.get("backward") or is_random(node):
            return node
        if node not in copies:
            copy = graph.node_copy(node, again)
            copy.meta = {**node.meta, "backward": True, "rematerialize": False}
            copies[node] = copy
        return copies[node]

    for reader in list(graph.nodes):
        if reader.op == "call_function" and reader.meta.get("backward"):
            with graph.inserting_before(reader):
                for source in reader.all_input_nodes:
                    reader.replace_input_with(source, again(source))
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
