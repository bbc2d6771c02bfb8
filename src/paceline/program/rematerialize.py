"""Which forward calls the backward pass makes again instead of keeping what they made.

Marks are set by region: what the user wraps in `torch.utils.checkpoint`, repeated blocks, or written-out attention.
What leaves a region is kept, else the first one to be read in the backward pass would make all those before it again.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping

import torch
from torch.fx import Graph, Node

from paceline.plan import Recompute
from paceline.program.program import Program

aten = torch.ops.aten
MARK = "rematerialize"
_BATCHED = {aten.bmm.default, aten.baddbmm.default}
_PRODUCTS = {*_BATCHED, aten.mm.default, aten.addmm.default, aten.convolution.default}
Regions = Mapping[Node, Hashable]


def recomputed(program: Program, policy: Recompute) -> Program:
    """Return a copy of a program in which what a policy names is marked, beside what is marked already."""
    program = program.copy()
    match policy:
        case Recompute.NONE:
            pass
        case Recompute.BLOCKS:
            mark(_blocks(program.graph))
        case Recompute.ATTENTION:
            mark(_attention(program.graph))
    return program


def mark(regions: Regions) -> None:
    """Mark the forward calls of each region, and unmark those of them that are read outside of it."""
    for node, region in regions.items():
        call = node.args[0] if node.target is operator.getitem else node
        assert isinstance(call, Node)
        results = [call, *(user for user in call.users if user.target is operator.getitem)]
        node.meta[MARK] = all(_is_inside(user, region, regions) for result in results for user in result.users)


def block_of(name: str) -> str | None:
    """Return the outermost numbered part that a name lies in, `blocks.3` of `blocks.3.attention.qkv`."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal() and str(int(part)) == part and position:
            return ".".join(parts[: position + 1])
    return None


def forward_calls(graph: Graph) -> Iterator[Node]:
    """Yield the calls of the forward pass, in order."""
    return (node for node in graph.nodes if node.op == "call_function" and not node.meta.get("backward"))


def _is_inside(reader: Node, region: Hashable, regions: Regions) -> bool:
    """Whether a reader is of the region, or of the backward pass, which decides nothing."""
    return bool(reader.meta.get("backward")) or regions.get(reader) == region


def _blocks(graph: Graph) -> Regions:
    named = ((node, block_of(str(node.meta.get("module") or ""))) for node in forward_calls(graph))
    return {node: block for node, block in named if block is not None}


def _attention(graph: Graph) -> Regions:
    """Return what lies between the batched products of attention that is written out: from its scores to its weights.

    Fused attention keeps neither, and is left alone.
    """
    reaches: dict[Node, bool] = {}
    regions: dict[Node, Hashable] = {}
    for node in forward_calls(graph):
        reaches[node] = node.target in _BATCHED or (
            node.target not in _PRODUCTS and any(reaches.get(source, False) for source in node.all_input_nodes)
        )
    for softmax in forward_calls(graph):
        if reaches[softmax] and _is_softmax(softmax):
            for node in (*_scores(softmax, reaches), *_weights(softmax)):
                regions.setdefault(node, softmax)
    return regions


def _is_softmax(node: Node) -> bool:
    target = node.target
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
    return name.endswith("softmax") and "log_softmax" not in name


def _scores(softmax: Node, reaches: Mapping[Node, bool]) -> Iterator[Node]:
    """Yield the calls from the product that makes scores to their softmax."""
    waiting, seen = [softmax], {softmax}
    while waiting:
        node = waiting.pop()
        yield node
        if node.target not in _BATCHED:
            fresh = [source for source in node.all_input_nodes if reaches.get(source, False) and source not in seen]
            seen.update(fresh)
            waiting += fresh


def _weights(softmax: Node) -> Iterator[Node]:
    """Yield what is made of the softmax, such as a dropout, and the product that reads it: its result leaves."""
    waiting, seen = [softmax], {softmax}
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and not user.meta.get("backward") and user not in seen:
                seen.add(user)
                yield user
                if user.target not in _PRODUCTS:
                    waiting.append(user)
