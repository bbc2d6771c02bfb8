"""How a program divides along each kind of axis: placed on two ranks of each, pieces are compared with wholes.

So the same rules and the same solver decide that decide when a plan runs. What halves on two ranks is taken to divide
by any number of them; what the ranks exchange is read off the placed program.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor
from torch.fx import Node

from paceline.errors import PlacementError, PlanError
from paceline.placement.calls import results
from paceline.placement.costs import Costs
from paceline.placement.machine import Machine, constant
from paceline.placement.origins import origins_of
from paceline.placement.place import PlacedProgram, place
from paceline.placement.placements import Placement
from paceline.placement.redistribute import is_redistribution
from paceline.plan import Mesh, Plan
from paceline.planner.saved import saved
from paceline.program.program import Program
from paceline.simulator.workload import Along

_PARTS = 2
_HALVED = 0.75
"""A piece is divided if it is smaller than this share of the whole: halos make pieces larger than a half."""
_UNLIMITED = 1 << 62
_HELD = 1e-8
"""Seconds that a byte is worth where all regions are split along time that can be."""
ACCELERATOR = Costs(
    latency=20e-6,
    per_byte_sent=1 / 200e9,
    machine=Machine(per_call=5e-6, products=constant(75e12), half_products=constant(200e12), touching=constant(1.2e12)),
)
"""Round figures of accelerators with fast links between them."""
_MESHES = {
    Along.BATCH: Plan(Mesh.parse(f"dp={_PARTS}")),
    Along.TP: Plan(Mesh.parse(f"tp={_PARTS}")),
    # With a limit of memory, whatever it is, regions between split layers may be split along time.
    Along.REGION: Plan(Mesh.parse(f"tp={_PARTS}"), memory_bytes=_UNLIMITED),
    Along.SP: Plan(Mesh.parse(f"sp={_PARTS}")),
    Along.HW: Plan(Mesh.parse(f"hw={_PARTS}")),
}
Tensors = Mapping[tuple[str, int], Tensor]


@dataclass(frozen=True)
class Split:
    """A program placed on two ranks.

    Attributes:
        along: the axis.
        placed: the placed program.
    """

    along: Along
    placed: PlacedProgram

    @cached_property
    def readers(self) -> dict[Node, str]:
        """The call of the captured program for which each call is made, by its name: what moves tensors, for a reader.

        What is moved for a call, and what is written for it, stands right before what is known to be its result.
        """
        found: dict[Node, str] = {}
        waiting: list[Node] = []
        for node in self.placed.program.graph.nodes:
            if node.op != "call_function":
                continue
            waiting.append(node)
            name = origins_of(node)[0].node
            if name and not is_redistribution(node):
                found.update(dict.fromkeys(waiting, name))
                waiting = []
        return found

    @cached_property
    def calls(self) -> dict[str, list[Node]]:
        """What became of each call of the captured program, by its name, without what moves tensors."""
        found: dict[str, list[Node]] = defaultdict(list)
        for node, name in self.readers.items():
            if not is_redistribution(node) and node.target is not operator.getitem:
                found[name].append(node)
        return found

    @cached_property
    def placements(self) -> dict[tuple[str, int], Placement]:
        """Where tensors of the captured program live along the axis as they are made, by its node and number."""
        found: dict[tuple[str, int], Placement] = {}
        for node in self.placed.program.graph.nodes:
            if not is_redistribution(node) and node.op != "output":
                for origin in origins_of(node):
                    if origin.node:
                        found.setdefault((origin.node, origin.index), origin.placements[-1])
        return found

    @cached_property
    def pieces(self) -> Tensors:
        """The pieces of tensors of the captured program, by its node and number, each as it is made first."""
        found: dict[tuple[str, int], Tensor] = {}
        for node in self.placed.program.graph.nodes:
            if is_redistribution(node) or node.op == "output":
                continue
            for origin, value in zip(origins_of(node), results(node), strict=True):
                if value is not None:
                    found.setdefault((origin.node, origin.index), value)
        return found

    @cached_property
    def saved(self) -> dict[tuple[str, int], int]:
        """Bytes that are kept for the backward pass, by the tensor of the captured program that they are."""
        found: dict[tuple[str, int], int] = defaultdict(int)
        for item in saved(self.placed.program.copy()):
            found[item.node, item.index] += item.nbytes
        return found

    def divides(self, name: str, index: int, whole: Tensor) -> bool:
        """Whether a tensor of the captured program is made in parts."""
        piece = self.pieces.get((name, index))
        return piece is not None and is_part(piece.numel(), whole.numel())

    def divides_kept(self, name: str, index: int, whole: Tensor, nbytes: int) -> bool:
        """Whether a tensor of the captured program is kept in parts: one that was gathered may be kept whole."""
        kept = self.saved.get((name, index))
        return self.divides(name, index, whole) if kept is None else is_part(kept, nbytes)


def is_part(piece: float, whole: float) -> bool:
    """Whether a size is that of one of two parts."""
    return piece < _HALVED * whole


def splits(program: Program, costs: Costs, tell: Callable[[str], None]) -> dict[Along, Split]:
    """Return a program placed on two ranks of each kind of axis that it can be split along."""
    found, holding = {}, replace(costs, latency=0.0, per_byte_held=_HELD)
    for along, plan in _MESHES.items():
        tell(f"placing it along {plan.mesh.names[0]}{', with regions' if along is Along.REGION else ''}")
        try:
            found[along] = Split(along, place(program, plan, costs=holding if along is Along.REGION else costs))
        except (PlanError, PlacementError):
            # There is no such dimension, or it is odd: nothing is divided along it.
            continue
    return found


def alongs(found: Collection[Along]) -> frozenset[Along]:
    """Return what an amount divides along: a region is an activation that tensor parallelism leaves whole otherwise."""
    is_region = Along.BATCH in found and Along.TP not in found
    return frozenset(found) - (frozenset() if is_region else {Along.REGION})
