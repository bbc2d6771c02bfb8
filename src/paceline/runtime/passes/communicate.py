"""Redistributions become packing, a started collective, a wait, and unpacking.

A collective starts as soon as its input exists and is waited for just before its result is read. Reductions of
gradients and gatherings of parameters are merged into buckets; gatherings start one bucket ahead of their use, so that
at most two buckets of whole parameters are in flight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from paceline.placement.origins import ORIGINS, origins_of
from paceline.placement.placements import (
    MAXIMUM,
    PARTIAL,
    Placement,
    Replicate,
    Shape,
    Shard,
    global_shape,
    local_shape,
)
from paceline.placement.redistribute import (
    Collective,
    collective_of,
    is_redistribution,
    redistribution_of,
)
from paceline.program.fake import evaluate, mode_of
from paceline.runtime import collectives
from paceline.runtime.passes.views import is_fresh, is_view
from paceline.runtime.passes.windows import start_windows

aten = torch.ops.aten


def communicate(graph: Graph, bucket_bytes: int) -> None:
    """Replace every `redistribute` of a forward or backward graph, in place.

    Args:
        graph: one pass of a placed program.
        bucket_bytes: collectives of gradients and parameters are merged until a bucket holds this many bytes.
    """
    _hoist_sources(graph)
    _sink_results(graph)
    emitter = _Emitter(graph)
    previous: _Group | None = None
    for group in _groups(graph, bucket_bytes):
        emitter.emit(group, after=previous if group.prefetch else None)
        if group.prefetch:
            previous = group
    for node in [node for node in reversed(graph.nodes) if is_redistribution(node)]:
        graph.erase_node(node)
    start_windows(graph)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    graph.lint()


@dataclass
class _Group:
    """Redistributions that share one collective (or none, when each rank works alone)."""

    kind: Collective | None
    nodes: list[Node]
    prefetch: bool = False
    first_reader: Node | None = field(default=None)


def _groups(graph: Graph, bucket_bytes: int) -> list[_Group]:
    """Return the groups in the order in which their collectives start, which is the same on every rank."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    gradients = _Buckets(bucket_bytes)
    gathers = _Buckets(bucket_bytes)
    groups: list[_Group] = []
    from_inputs = _made_from_inputs(graph)
    nodes = [node for node in graph.nodes if is_redistribution(node)]
    for node in sorted(nodes, key=lambda n: order[n.args[0]]):
        _, source, target, _, _ = redistribution_of(node)
        kind = collective_of(source, target)
        if (
            bucket_bytes
            and kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
            and source == PARTIAL
            and _only_for_output(node)
        ):
            gradients.add(kind, node)
        elif not (kind is Collective.ALL_GATHER and isinstance(target, Replicate) and node.args[0] in from_inputs):
            groups.append(_Group(kind, [node]))
    for node in sorted(nodes, key=lambda n: min((order[user] for user in n.users), default=order[n])):
        _, source, target, _, _ = redistribution_of(node)
        kind = collective_of(source, target)
        if kind is Collective.ALL_GATHER and isinstance(target, Replicate) and node.args[0] in from_inputs:
            gathers.add(kind, node)
    groups += [_Group(kind, found) for kind, found in gradients.closed()]
    groups.sort(key=lambda group: max(order[node.args[0]] for node in group.nodes))
    ahead = [_Group(kind, found, prefetch=True) for kind, found in gathers.closed()]
    ahead.sort(key=lambda group: min((order[user] for user in group.nodes[0].users), default=order[group.nodes[0]]))
    return ahead + groups


class _Buckets:
    """Collects redistributions of equal kind, axis and dtype into buckets of bounded size."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._open: dict[tuple[Any, ...], list[Node]] = {}
        self._closed: list[tuple[Collective, list[Node]]] = []

    def add(self, kind: Collective, node: Node) -> None:
        x, _, _, axis, _ = redistribution_of(node)
        key = (kind, axis, x.meta["val"].dtype, x.meta["val"].device, _depth(node))
        if _bytes(node) >= self._most:  # alone it needs no copy
            self._closed.append((kind, [node]))
            return
        bucket = self._open.setdefault(key, [])
        bucket.append(node)
        if sum(_bytes(item) for item in bucket) >= self._most:
            self._closed.append((kind, self._open.pop(key)))

    def closed(self) -> list[tuple[Collective, list[Node]]]:
        rest = [(key[0], nodes) for key, nodes in self._open.items()]
        return self._closed + rest


def _depth(node: Node) -> int:
    """How many redistributions a tensor went through before; those of one bucket must not depend on each other."""
    source = node.args[0]
    return 1 + _depth(source) if isinstance(source, Node) and is_redistribution(source) else 0


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    source = redistribution_of(node)[0].meta["val"]
    return int(max(value.numel(), source.numel()) * value.element_size())


def _only_for_output(node: Node) -> bool:
    return all(
        user.op == "output" or ((is_redistribution(user) or is_view(user)) and _only_for_output(user))
        for user in node.users
    )


def _sink_results(graph: Graph) -> None:
    """Move what only makes outputs of the graph to its end, level by level of redistribution.

    So the members of a bucket are all read after all of them can be made.
    """
    level: dict[Node, int] = {}
    for node in graph.nodes:
        redistributes = is_redistribution(node)
        if (redistributes or is_view(node)) and _only_for_output(node):
            source = node.args[0]
            assert isinstance(source, Node)
            below = level.get(source, 0)
            level[node] = below + 2 - below % 2 if redistributes else below | 1
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    for node in sorted(level, key=lambda node: level[node]):
        output.prepend(node)


def _hoist_sources(graph: Graph) -> None:
    """Move what parameters are gathered from, their casts and views, to the front.

    A bucket starts when its last member is there, which must be before its first reader.
    """
    made = _made_from_inputs(graph)
    hoisted: set[Node] = set()
    for node in reversed(graph.nodes):
        if is_redistribution(node):
            source = redistribution_of(node)[0]
            if source in made:
                hoisted.add(source)
        elif node in hoisted:
            hoisted.update(node.all_input_nodes)
    calls = {node for node in hoisted if node.op == "call_function"}
    front = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr") and node not in calls)
    for node in list(graph.nodes):
        if node in calls:
            front.prepend(node)


def _made_from_inputs(graph: Graph) -> set[Node]:
    """Nodes that need nothing but an input: parameters, their views and casts."""
    made: set[Node] = set()
    for node in graph.nodes:
        single = node.op == "call_function" and len(node.all_input_nodes) == 1 and not is_redistribution(node)
        if node.op == "placeholder" or (single and node.all_input_nodes[0] in made):
            made.add(node)
    return made


class _Emitter:
    """Writes the nodes of a group at the right places."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.mode = mode_of(graph)
        self.meta: dict[str, Any] = {}

    def call(self, target: Callable[..., Any], *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        node.meta = {**self.meta, "val": evaluate(node, self.mode)}
        return node

    def item(self, node: Node, index: int) -> Node:
        return self.call(operator.getitem, node, index)

    def emit(self, group: _Group, after: _Group | None) -> None:
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        first = group.nodes[0]
        self.meta = {"backward": first.meta["backward"], "module": first.meta["module"], "rematerialize": False}
        sources = [redistribution_of(node)[0] for node in group.nodes]
        start_at = _next_call(max(sources, key=lambda source: order[source]))
        readers = [user for node in group.nodes for user in node.users]
        group.first_reader = min(readers, key=lambda user: order[user])
        if after is not None and after.first_reader is not None:
            one_ahead = min(after.first_reader, group.first_reader, key=lambda node: order[node])
            start_at = max(start_at, one_ahead, key=lambda node: order[node])
        results = self._write(group, start_at, group.first_reader)
        for node, result in zip(group.nodes, results, strict=True):
            result.meta = {**result.meta, ORIGINS: origins_of(node)}
            node.replace_all_uses_with(result)

    def _write(self, group: _Group, start_at: Node, wait_at: Node) -> list[Node]:
        moves = [_Move.of(node) for node in group.nodes]
        if group.kind is None:
            with self.graph.inserting_before(wait_at):
                return [self._alone(move) for move in moves]
        fresh = is_fresh(moves[0].x)
        with self.graph.inserting_before(start_at):
            packed = [self._pack(move, group.kind) for move in moves]
            started = self._start(group, moves[0], packed, fresh)
        with self.graph.inserting_before(wait_at):
            waited = self.call(collectives.wait, started)
            return [
                self._unpack(move, group.kind, piece)
                for move, piece in zip(moves, self._split(group, waited, packed), strict=True)
            ]

    def _alone(self, move: _Move) -> Node:
        match move.source, move.target:
            case Replicate(), Shard():
                return self.call(collectives.take_piece, move.x, move.target, move.axis, move.parts)
            case Replicate(), _:
                return self.call(collectives.take_term, move.x, move.axis, move.parts)
        raise AssertionError(f"no rule ever makes {move.target} of {move.source}")

    def _pack(self, move: _Move, kind: Collective) -> Node:
        """Return the tensor in the layout that the collective sends."""
        match kind:
            case Collective.ALL_REDUCE:
                return self.call(aten.reshape.default, move.x, [-1])
            case Collective.ALL_GATHER:
                return self.call(aten.reshape.default, move.x, [-1])
            case _:
                assert isinstance(move.target, Shard)
                return self._rows_by_rank(move.x, move.local, move.target, move.parts)

    def _rows_by_rank(self, x: Node, shape: Shape, shard: Shard, parts: int) -> Node:
        if not isinstance(shard.blocks, int):
            return self._segments_by_rank(x, shard.dim, shard.blocks, parts)
        outer = prod(shape[: shard.dim]) * shard.blocks
        rest = prod(shape) // (outer * parts)
        if outer > 1:
            x = self.call(aten.reshape.default, x, [outer, parts, rest])
            x = self.call(aten.permute.default, x, [1, 0, 2])
        return self.call(aten.reshape.default, x, [parts, outer * rest])

    def _segments_by_rank(self, x: Node, dim: int, segments: tuple[int, ...], parts: int) -> Node:
        cuts = self.call(
            aten.split_with_sizes.default, x, [size // parts for size in segments for _ in range(parts)], dim
        )
        rows = []
        for rank in range(parts):
            mine = [self.item(cuts, block * parts + rank) for block in range(len(segments))]
            rows.append(self.call(aten.reshape.default, self.call(aten.cat.default, mine, dim), [1, -1]))
        return self.call(aten.cat.default, rows, 0)

    def _start(self, group: _Group, move: _Move, packed: list[Node], fresh: bool) -> Node:
        where = (move.axis, move.parts)
        match group.kind:
            case Collective.ALL_REDUCE if move.source == MAXIMUM:
                return self.call(collectives.all_reduce_max, packed[0], *where)
            case Collective.ALL_REDUCE if len(packed) == 1 and fresh:
                return self.call(collectives.all_reduce_in_place, packed[0], *where)
            case Collective.ALL_REDUCE if len(packed) > 1:
                return self.call(collectives.all_reduce_in_place, self.call(aten.cat.default, packed, 0), *where)
            case Collective.ALL_REDUCE:
                return self.call(collectives.all_reduce, packed[0], *where)
            case Collective.REDUCE_SCATTER:
                x = packed[0] if len(packed) == 1 else self.call(aten.cat.default, packed, 1)
                return self.call(collectives.reduce_scatter, x, *where)
            case Collective.ALL_GATHER:
                x = packed[0] if len(packed) == 1 else self.call(aten.cat.default, packed, 0)
                return self.call(collectives.all_gather, x, *where)
            case _:
                return self.call(collectives.all_to_all, packed[0], *where)

    def _split(self, group: _Group, waited: Node, packed: list[Node]) -> Iterable[Node]:
        """Return each member's part of the result of a bucket."""
        if len(packed) == 1:
            return [waited]
        sizes = [node.meta["val"].shape[-1] for node in packed]
        dim = 1 if group.kind is Collective.ALL_GATHER else 0
        pieces = self.call(aten.split_with_sizes.default, waited, sizes, dim)
        return [self.item(pieces, i) for i in range(len(packed))]

    def _unpack(self, move: _Move, kind: Collective, piece: Node) -> Node:
        match kind:
            case Collective.ALL_REDUCE:
                whole = self.call(aten.reshape.default, piece, list(move.local))
                if isinstance(move.target, Replicate):
                    return whole
                return self.call(collectives.take_piece, whole, move.target, move.axis, move.parts)
            case Collective.REDUCE_SCATTER:
                assert isinstance(move.target, Shard)
                return self.call(aten.reshape.default, piece, list(local_shape(move.local, move.target, move.parts)))
            case Collective.ALL_GATHER:
                assert isinstance(move.source, Shard)
                whole = self._join(piece, move.local, move.source, move.parts)
                if isinstance(move.target, Replicate):
                    return whole
                return self.call(collectives.take_piece, whole, move.target, move.axis, move.parts)
            case Collective.ALL_TO_ALL:
                assert isinstance(move.source, Shard) and isinstance(move.target, Shard)
                return self._join(piece, local_shape(move.local, move.target, move.parts), move.source, move.parts)

    def _join(self, rows: Node, local: Shape, shard: Shard, parts: int) -> Node:
        """rows: [parts, n], each a piece of shape `local` split along `shard`; returns the joined tensor."""
        if not isinstance(shard.blocks, int):
            return self._join_segments(rows, local, shard.dim, shard.blocks, parts)
        outer = prod(local[: shard.dim]) * shard.blocks
        if outer > 1:
            rows = self.call(aten.reshape.default, rows, [parts, outer, prod(local) // outer])
            rows = self.call(aten.permute.default, rows, [1, 0, 2])
        return self.call(aten.reshape.default, rows, list(global_shape(local, shard, parts)))

    def _join_segments(self, rows: Node, local: Shape, dim: int, segments: tuple[int, ...], parts: int) -> Node:
        sizes = [size // parts for size in segments]
        pieces = [self.call(aten.reshape.default, self.call(aten.select.int, rows, 0, i), local) for i in range(parts)]
        cuts = [self.call(aten.split_with_sizes.default, piece, sizes, dim) for piece in pieces]
        return self.call(aten.cat.default, [self.item(cut, block) for block in range(len(sizes)) for cut in cuts], dim)


@dataclass(frozen=True)
class _Move:
    """A redistribution, read."""

    x: Node
    local: Shape
    source: Placement
    target: Placement
    axis: str
    parts: int

    @classmethod
    def of(cls, node: Node) -> _Move:
        x, source, target, axis, parts = redistribution_of(node)
        return cls(x, tuple(x.meta["val"].shape), source, target, axis, parts)


def _next_call(node: Node) -> Node:
    """The first place after `node` at which calls may stand."""
    following = node.next
    while following.op in ("placeholder", "get_attr"):
        following = following.next
    return following
