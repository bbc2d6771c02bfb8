"""What users ask of the solver: placements of activations (`constrain`) and of parameters (pins)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch.fx import Node

from paceline.errors import PlacementError, nearest
from paceline.placement.placements import REPLICATE, Placement, divides, parse_placement
from paceline.placement.rules.constraint import CONSTRAIN
from paceline.plan import Pin
from paceline.program.program import Input, InputRole, Program

__all__ = ["CONSTRAIN", "check_pin", "constraint_of", "pinned"]


def constraint_of(node: Node, axis: str) -> Placement | None:
    """Return the placement that a call of `constrain` asks for along an axis, if it does.

    Raises:
        PlacementError: it is no placement.
    """
    asked = dict(part.split("=") for part in str(node.args[1]).split(",") if part)
    return parse_placement(asked[axis]) if axis in asked else None


def pinned(program: Program, pins: Sequence[Pin], axes: Sequence[str]) -> dict[str, dict[Input, Placement]]:
    """Return, for each axis, the placements that pins ask for. Later pins win over earlier ones.

    Raises:
        PlacementError: a pattern matches no parameter, or a placement cannot be read.
    """
    parameters = [item for item in program.inputs if item.role is InputRole.PARAMETER]
    known = {item.name: item for item in parameters}
    known |= {alias: known[name] for alias, name in program.aliases.items() if name in known}
    found: dict[str, dict[Input, Placement]] = {axis: {} for axis in axes}
    for pattern, wanted in pins:
        matching = [item for name, item in known.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise PlacementError(f"the pin '{pattern}' matches no parameter.{nearest(pattern, known)}")
        for axis, text in wanted.items():
            found[axis].update(dict.fromkeys(matching, parse_placement(text)))
    return found


def check_pin(item: Input, shape: tuple[int, ...], placement: Placement, axis: str, parts: int) -> None:
    """Check that a parameter can be placed as its pin says.

    Raises:
        PlacementError: it cannot.
    """
    if placement != REPLICATE and not divides(shape, placement, parts):
        raise PlacementError(
            f"'{item.name}' is pinned to {placement} along '{axis}': a tensor of shape {list(shape)} does not divide "
            f"so over {parts} ranks."
        )
