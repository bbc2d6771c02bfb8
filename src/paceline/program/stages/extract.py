"""Graphs of parts, taken out of the joint graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from paceline.program.stages.kinds import is_call
from paceline.program.stages.pipeline import Part
from paceline.program.stages.reading import Reading


def needed(targets: Iterable[Node], given: Collection[Node]) -> set[Node]:
    """Return the nodes that must be made to have `targets` where `given` and the program's inputs are at hand."""
    waiting, found = list(targets), set[Node]()
    while waiting:
        node = waiting.pop()
        if node not in found and node not in given and node.op != "placeholder":
            found.add(node)
            waiting += node.all_input_nodes
    return found


def extract(reading: Reading, targets: Iterable[Node], given: Collection[Node], *, backward: bool) -> Part:
    """Return the part that makes `targets`, in the order of the joint graph.

    Args:
        reading: of the joint graph.
        targets: may be among `given`.
        given: what the stage has when the part begins, beside the program's inputs.
        backward: of the backward pass. What it makes again it makes right before the first reader.
    """
    targets = list(dict.fromkeys(targets))
    making = needed(targets, given)
    has_place = reading.is_gradient if backward else reading.is_forward
    inputs = {source for node in making for source in node.all_input_nodes if source not in making}
    inputs |= {target for target in targets if target not in making}
    ordered = sorted(inputs, key=reading.order.__getitem__)
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in ordered:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    main = [node for node in sorted(making, key=reading.order.__getitem__) if has_place(node)]
    for node in [*main, *targets]:
        missing = needed([node], copies)
        for made in sorted(missing, key=reading.order.__getitem__):
            copies[made] = _copy(graph, made, copies)
            if backward and is_call(made):
                copies[made].meta |= {"backward": True, "rematerialize": False}
    graph.output(tuple(copies[target] for target in targets))
    return Part(graph, tuple(node.name for node in ordered), tuple(target.name for target in targets))


def _copy(graph: Graph, node: Node, copies: Mapping[Node, Node]) -> Node:
    """Append a copy of a node that reads copies."""
    # Torch searches arguments given at creation for symbolic numbers, which takes as long as all the rest.
    copy = graph.create_node(node.op, node.target, name=node.name)
    copy.args, copy.kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
    copy.meta = dict(node.meta)
    return copy
