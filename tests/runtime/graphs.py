"""Placed graphs written by hand, and the global tensors whose pieces they compute on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from paceline.placement.pieces import join, take
from paceline.placement.placements import PARTIAL, Placement, Replicate, Shape, local_shape
from paceline.placement.redistribute import redistribute
from paceline.plan import Mesh
from paceline.program.fake import fake_mode
from paceline.runtime import collectives
from paceline.runtime.inprocess import InProcessExecutor


class Writer:
    """Writes a graph of `redistribute` calls on the pieces of placed tensors, innermost axis last."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = fake_mode()

    def input(self, shape: Shape, dtype: torch.dtype = torch.float64) -> Node:
        """A placeholder whose local piece has this shape."""
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta = self._meta(torch.empty(shape, dtype=dtype))
        return node

    def call(self, target: object, *args: object, backward: bool = False) -> Node:
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        with self.mode:
            read = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
            node.meta = {**self._meta(target(*read)), "backward": backward}  # type: ignore[operator]
        return node

    def move(self, x: Node, source: Placement, target: Placement, axis: str, parts: int) -> Node:
        return self.call(redistribute, x, source, target, axis, parts)

    def output(self, values: Sequence[Node]) -> Graph:
        self.graph.output(tuple(values))
        return self.graph

    def _meta(self, value: Tensor) -> dict[str, object]:
        return {"val": value, "backward": False, "module": "", "rematerialize": False}


def local_of(shape: Shape, placements: Sequence[Placement], mesh: Mesh) -> Shape:
    """Shape of a piece; `placements` are those along each axis, outermost first."""
    for placement, (_, parts) in zip(placements, mesh.axes, strict=True):
        shape = local_shape(shape, placement, parts)
    return shape


def integers(shape: Shape) -> Tensor:
    """Random whole numbers in float64: their sums are exact in any order."""
    return torch.randint(-1000, 1000, shape).double()


def scatter(whole: Tensor, placements: Sequence[Placement], mesh: Mesh) -> list[Tensor]:
    """The piece of every rank; partial sums are random terms."""
    pieces = {(): whole}
    for placement, (_, parts) in zip(placements, mesh.axes, strict=True):
        finer = {}
        for where, tensor in pieces.items():
            terms = _terms(tensor, parts) if placement == PARTIAL else None
            for index in range(parts):
                finer[(*where, index)] = terms[index] if terms else take(tensor, placement, parts, index)
        pieces = finer
    return [pieces[tuple(mesh.coordinate(rank).values())].clone() for rank in range(mesh.size)]


def gather(pieces: Sequence[Tensor], placements: Sequence[Placement], mesh: Mesh) -> Tensor:
    """The global tensor; checks that replicas agree."""
    found = {tuple(mesh.coordinate(rank).values()): piece for rank, piece in enumerate(pieces)}
    for placement in reversed(placements):
        coarser: dict[tuple[int, ...], list[Tensor]] = {}
        for where, piece in sorted(found.items(), key=lambda item: item[0]):
            coarser.setdefault(where[:-1], []).append(piece)
        if isinstance(placement, Replicate):
            for group in coarser.values():
                assert all(torch.equal(group[0], other) for other in group[1:])
        found = {where: join(group, placement) for where, group in coarser.items()}
    return found[()]


def _terms(whole: Tensor, parts: int) -> list[Tensor]:
    terms = [integers(tuple(whole.shape)) for _ in range(parts - 1)]
    return [*terms, whole - sum(terms, torch.zeros_like(whole))]


def run(graph: Graph, mesh: Mesh, inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Run a lowered graph; `inputs` and results are indexed [value][rank]."""
    function = InProcessExecutor(mesh, [torch.device("cpu")]).prepare(graph, {})
    results = function([list(column) for column in zip(*inputs, strict=True)])
    return [list(row) for row in zip(*results, strict=True)]


def starts(graph: Graph) -> list[Node]:
    """The nodes that start a collective, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in collectives.STARTS]
