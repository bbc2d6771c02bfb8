"""What ranks exchange: read off the two passes of a step before their collectives are merged, and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from paceline.placement.origins import origins_of
from paceline.placement.placements import Placement, Shard
from paceline.placement.redistribute import collective_of, is_redistribution, redistribution_of
from paceline.planner.captured import Captured
from paceline.planner.explanation import PerBlock, Total, Transfer, What
from paceline.planner.folding import fold
from paceline.program.program import OutputRole
from paceline.program.rematerialize import block_of
from paceline.runtime.passes.partition import Partition
from paceline.runtime.passes.views import is_view
from paceline.runtime.traffic import HALO, exchanges, is_halo
from paceline.runtime.windows import layout_of, sent_bytes

_OUTPUTS = {OutputRole.LOSS: What.LOSS, OutputRole.WEIGHT: What.LOSS, OutputRole.BUFFER: What.BUFFER}
Named = tuple[What, str]
Homes = Mapping[str, Mapping[str, Placement]]
"""Where each parameter lives, by axis."""


def transfers(parts: Partition, captured: Captured, homes: Homes) -> Iterator[Transfer]:
    """Yield every tensor that is exchanged, in the order of the program."""
    forward = [(_OUTPUTS[output.role], output.name) for output in parts.forward_outputs]
    yield from _of_pass(parts.forward, forward, captured, backward=False)
    if parts.backward is None:
        return
    gradients = [(What.GRADIENT, name) for name in parts.gradients]
    for item in _of_pass(parts.backward, gradients, captured, backward=True):
        if item.what is What.GRADIENT and isinstance(item.target, Shard):
            # What is reduced may be seen as another shape, a bias as [1, n]; it becomes what the parameter is.
            item = replace(item, target=homes[item.name][item.axis])
        yield item


def _of_pass(graph: Graph, outputs: list[Named], captured: Captured, *, backward: bool) -> Iterator[Transfer]:
    leads_to = _destinations(graph, outputs)
    for node in graph.nodes:
        if is_redistribution(node):
            x, source, target, axis, _ = redistribution_of(node)
            kind = collective_of(source, target)
            if kind is not None:
                what, name, operator = _what(node, leads_to.get(node), captured)
                nbytes = x.meta["val"].nbytes
                yield Transfer(axis, kind.value, backward, what, name, operator, source, target, nbytes)
        elif is_halo(node):
            dim, _ = layout_of(node)
            what, name, operator = _inside(node)
            yield Transfer(
                str(node.args[-2]), HALO, backward, what, name, operator, Shard(dim), Shard(dim), sent_bytes(node)
            )


def _what(node: Node, destination: Named | None, captured: Captured) -> tuple[What, str, str]:
    if destination is not None:
        return (*destination, "")
    (origin,) = origins_of(node)
    made = captured.node(origin)
    if made is None:
        return _inside(node)
    what, name, operator = captured.what(made)
    if not name and what is What.ACTIVATION_GRADIENT:
        name = node.meta.get("module", "")  # sums of gradients belong to no module; who reads them does
    return what, name, operator


def _inside(node: Node) -> tuple[What, str, str]:
    """Return what is known of a tensor that a rule wrote, inside of an operator."""
    kind = What.ACTIVATION_GRADIENT if node.meta.get("backward") else What.ACTIVATION
    return kind, node.meta.get("module", ""), ""


def _destinations(graph: Graph, outputs: list[Named]) -> dict[Node, Named]:
    """Return the output that a tensor becomes, for those that become nothing else."""
    leads_to: dict[Node, Named] = {}
    last = next(node for node in reversed(graph.nodes) if node.op == "output")
    values = last.args[0]
    assert isinstance(values, (list, tuple))
    for value, named in zip(values, outputs, strict=False):  # saved values come after the outputs
        assert isinstance(value, Node)
        leads_to[value] = named
    for node in reversed(graph.nodes):
        readers = [user for user in node.users if user is not last]
        if not all(user in leads_to and (is_redistribution(user) or is_view(user)) for user in readers):
            leads_to.pop(node, None)
        elif readers:
            leads_to.setdefault(node, leads_to[readers[0]])
    return leads_to


def per_block(exchanged: Sequence[Transfer], axes: Sequence[str]) -> tuple[PerBlock, ...]:
    """Return what each repeated block exchanges along each axis; blocks that exchange the same are told together."""
    blocks = {item.name: block_of(item.name) or "" for item in exchanged}
    siblings = Counter(block.rpartition(".")[0] for block in set(blocks.values()))
    found = []
    for axis in axes:
        counts: dict[str, Counter[tuple[bool, str]]] = {}
        for item in exchanged:
            if item.axis == axis:
                block = blocks[item.name]
                block = block if siblings[block.rpartition(".")[0]] > 1 else ""
                counts.setdefault(block, Counter())[item.backward, item.kind] += 1
        moved = {
            block: tuple(sorted((backward, kind, n) for (backward, kind), n in of_block.items()))
            for block, of_block in counts.items()
        }
        groups = fold(moved, name=str, alike=moved.__getitem__)
        groups.sort(key=lambda group: group.name == "")
        found += [PerBlock(axis, group.name, len(group.items), moved[group.first]) for group in groups]
    return tuple(found)


def totals(
    exchanged: Iterable[Transfer], axes: Sequence[str], forward: Graph, backward: Graph | None
) -> tuple[Total, ...]:
    """Return transfers by axis, pass and kind.

    Args:
        exchanged: all of them.
        axes: of the mesh.
        forward: the forward pass, with its collectives in order.
        backward: the backward pass, likewise.
    """
    collectives = Counter((found.axis, False, found.kind) for found in exchanges(forward))
    if backward is not None:
        collectives.update((found.axis, True, found.kind) for found in exchanges(backward))
    tensors: Counter[tuple[str, bool, str]] = Counter()
    nbytes: Counter[tuple[str, bool, str]] = Counter()
    for item in exchanged:
        key = item.axis, item.backward, item.kind
        tensors[key] += 1
        nbytes[key] += item.bytes
    return tuple(
        Total(axis, kind, is_backward, count, collectives[axis, is_backward, kind], nbytes[axis, is_backward, kind])
        for (axis, is_backward, kind), count in sorted(tensors.items(), key=lambda entry: _order(entry[0], axes))
    )


def _order(key: tuple[str, bool, str], axes: Sequence[str]) -> tuple[int, bool, str]:
    axis, backward, kind = key
    return axes.index(axis), backward, kind
