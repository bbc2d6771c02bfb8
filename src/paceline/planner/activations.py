"""What the forward pass makes and keeps: read off a placed program's forward graph.

Memory is that of the storages of its fake tensors, so a view is counted with what it is a view of, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Graph, Node

from paceline.placement.calls import results
from paceline.placement.origins import Origin, origins_of
from paceline.placement.placements import Placement
from paceline.placement.redistribute import collective_of, is_redistribution, redistribution_of
from paceline.planner.captured import Captured, operator_name, what_is
from paceline.planner.explanation import Activation, What
from paceline.program.fake import own_values, storage_key
from paceline.runtime.passes.partition import Partition

Tensors = dict[tuple[str, int], tuple[Tensor, tuple[Placement, ...]]]


@dataclass
class _Storage:
    """Memory that the forward pass allocates: the node that does, and what is known of it."""

    maker: Node
    value: Tensor
    kept: bool = False
    main: Origin | None = field(default=None)


def activations(parts: Partition, captured: Captured) -> Iterator[Activation]:
    """Yield the main results of the forward pass and all that is kept for the backward pass, in order."""
    graph = parts.forward
    own_values(graph)
    storages = _storages(graph)
    for node in _kept(graph, len(parts.forward_outputs)):
        for value in results(node):
            if value is not None and storage_key(value) in storages:
                storages[storage_key(value)].kept = True
    pieces = _pieces(graph)
    for (name, index), (value, _) in pieces.items():
        origin, storage = Origin(name, index), storages.get(storage_key(value))
        if storage is not None and storage.main is None and captured.is_main(origin):
            storage.main = origin
    for storage in storages.values():
        if storage.kept or storage.main is not None:
            yield _activation(storage, captured, pieces)


def _storages(graph: Graph) -> dict[int, _Storage]:
    """Return what the pass itself allocates; inputs and constants are there already."""
    found: dict[int, _Storage] = {}
    given: set[int] = set()
    for node in graph.nodes:
        for value in results(node):
            if value is None:
                continue
            if node.op != "call_function":
                given.add(storage_key(value))
            elif storage_key(value) not in given:
                found.setdefault(storage_key(value), _Storage(node, value))
    return found


def _kept(graph: Graph, outputs: int) -> list[Node]:
    (values,) = next(node for node in reversed(graph.nodes) if node.op == "output").args
    assert isinstance(values, (list, tuple))
    return [value for value in values[outputs:] if isinstance(value, Node)]


def _pieces(graph: Graph) -> Tensors:
    """Return the pieces of tensors of the captured program, each as it is made first, and their placements."""
    found: Tensors = {}
    for node in graph.nodes:
        if is_redistribution(node) or node.op == "output":
            continue
        for origin, value in zip(origins_of(node), results(node), strict=True):
            if value is not None:
                found.setdefault((origin.node, origin.index), (value, origin.placements))
    return found


def _activation(storage: _Storage, captured: Captured, pieces: Tensors) -> Activation:
    maker = storage.maker
    index = next(i for i, result in enumerate(results(maker)) if result is storage.value)
    origin = storage.main or origins_of(maker)[index]
    made = captured.node(origin)
    what, name = What.ACTIVATION, maker.meta.get("module", "")
    item = None if made is None else captured.input(made)
    if item is not None:
        what, name = what_is(item), item.name
    if is_redistribution(maker):
        kind = collective_of(*redistribution_of(maker)[1:3])
        operator = "cut" if kind is None else kind.value
        value, placements = storage.value, origin.placements
    else:
        operator = operator_name(maker if made is None else made)
        origin = captured.as_returned(origin) if storage.main is not None else origin
        value, placements = pieces.get((origin.node, origin.index), (storage.value, origin.placements))
    whole = captured.value(origin)
    return Activation(
        what=what,
        name=name,
        operator=operator,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(value.shape if whole is None else whole.shape),
        placements=() if whole is None else placements,
        local=tuple(value.shape),
        bytes=storage.value.untyped_storage().nbytes(),
        kept=storage.kept,
        main=storage.main is not None,
    )
