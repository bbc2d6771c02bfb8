"""Simplifications of a captured graph that change nothing it computes."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import Graph, Node

from paceline.program.program import Input, InputRole, Output, OutputRole, Program

aten = torch.ops.aten
_IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}


def tidy(graph: Graph) -> None:
    """Remove identities, assertions and dead code; a pure graph needs none of them.

    What is told in strides, and is no more than another shape, becomes a `reshape`: rules know shapes and no strides.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _IDENTITIES:
            source = node.args[0]
            assert isinstance(source, Node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target in (aten.as_strided.default, aten.as_strided_scatter.default) and _only_reshapes(node):
            base, source = node.args[0], node.args[node.target is aten.as_strided_scatter.default]
            assert isinstance(base, Node)
            size = node.args[1] if node.target is aten.as_strided.default else list(base.meta["val"].shape)
            node.target, node.args, node.kwargs = aten.reshape.default, (source, size), {}
        elif node.meta.get("val") is None and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def _only_reshapes(node: Node) -> bool:
    """Whether the strides of a call are those of all elements of its first argument, in their order."""
    schema = node.target._schema  # type: ignore[union-attr]  # an operator has one
    given = {**dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)), **node.kwargs}
    base, size, stride = node.args[0], given["size"], given["stride"]
    assert isinstance(base, Node)
    whole = base.meta["val"]
    dense: list[int] = []
    step = 1
    for extent in reversed(size):
        dense.insert(0, step)
        step *= extent
    in_order = all(extent == 1 or want == got for extent, want, got in zip(size, dense, stride, strict=True))
    return in_order and step == whole.numel() and whole.is_contiguous() and not given.get("storage_offset")


def merge_tied_inputs(program: Program, module: nn.Module) -> None:
    """Make tied parameters and buffers one input each, with the sum of their gradients.

    The name that stays is the first, as in `module.named_parameters()`.
    """
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        original = first_name.setdefault(id(tensor), name)
        if original != name:
            aliases[name] = original
    program.aliases = aliases
    graph = program.graph
    node_of = dict(zip(program.inputs, program.placeholders, strict=True))
    for item, node in list(node_of.items()):
        if item.role in (InputRole.PARAMETER, InputRole.BUFFER) and item.name in aliases:
            node.replace_all_uses_with(node_of[Input(item.role, aliases[item.name])])
            graph.erase_node(node)
            del node_of[item]
    program.inputs = tuple(node_of)
    results: dict[Output, Node] = {}
    with graph.inserting_before(program.output_node):
        for output, node in zip(program.outputs, program.results, strict=True):
            merged = Output(output.role, aliases.get(output.name, output.name))
            if merged not in results:
                results[merged] = node
            elif merged.role is OutputRole.GRADIENT:
                total = graph.call_function(aten.add.Tensor, (results[merged], node))
                total.meta = {**node.meta, "backward": True, "sequence": None}
                results[merged] = total
    program.outputs = tuple(results)
    program.output_node.args = (tuple(results.values()),)
