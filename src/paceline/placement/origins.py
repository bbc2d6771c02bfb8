"""Origins: which tensor of the captured program a tensor of a placed one is a piece of.

They let a placed program be compared with the captured one, value by value. Lowering keeps them in
`node.meta["origins"]`, one per result of the node.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from paceline.placement.calls import results
from paceline.placement.placements import Placement

ORIGINS = "origins"


@dataclass(frozen=True)
class Origin:
    """A tensor of the captured program: its node, which of the node's results, and where its pieces are.

    Attributes:
        node: name of the node in the captured graph.
        index: which of the node's results it is; 0 for a node that returns one tensor.
        placements: along each axis placed so far, outermost first.
    """

    node: str
    index: int
    placements: tuple[Placement, ...] = ()

    def along(self, placement: Placement) -> Origin:
        """Return the origin of a piece, placed so along the next axis."""
        return Origin(self.node, self.index, (*self.placements, placement))


UNKNOWN = Origin("", 0)
"""Of a tensor that no tensor of the captured program corresponds to."""


def origins_of(node: Node) -> tuple[Origin, ...]:
    """Return the origin of each result; a node of a captured graph is its own."""
    found: tuple[Origin, ...] | None = node.meta.get(ORIGINS)
    return tuple(Origin(node.name, index) for index in range(len(results(node)))) if found is None else found
