"""Whether the dimensions of a batch divide over the axes that split them."""

from __future__ import annotations

from math import prod

from paceline.errors import PlanError
from paceline.placement.dimensions import Dimension, Dimensions
from paceline.placement.intents import intent_of
from paceline.placement.placements import Shape
from paceline.plan import Axis, Mesh
from paceline.program.program import Input


def check_batch(batch: int, mesh: Mesh) -> None:
    """Check that the global batch divides over the axes that split it.

    Raises:
        PlanError: it does not; the message names sizes that do.
    """
    parts = mesh.batch_parts
    if batch % parts == 0:
        return
    divisors = [n for n in range(1, batch + 1) if batch % n == 0 and n <= 64]
    raise PlanError(
        f"a batch of {batch} does not divide over {parts} ranks (mesh {mesh}). Use a batch of {_sizes(batch, parts)}, "
        f"or a mesh of {', '.join(map(str, divisors))} ranks."
    )


def check_dimensions(shapes: dict[Input, Shape], meanings: dict[Input, Dimensions], mesh: Mesh) -> None:
    """Check that each axis that splits time, height or width finds one, and that it divides.

    Raises:
        PlanError: none is there, or it does not divide; the message names sizes that do.
    """
    for axis, parts in mesh.axes:
        follow = intent_of(Axis(axis), split_batch=True).follow - {Dimension.BATCH}
        if not follow or parts == 1:
            continue
        names = " or ".join(sorted(dimension.value for dimension in follow))
        there = [(item, dim) for item, means in meanings.items() for dim, what in enumerate(means) if what in follow]
        if not there:
            inputs = ", ".join(f"{item.name} {list(shape)}" for item, shape in shapes.items())
            raise PlanError(f"axis '{axis}' splits {names}, and no batch input has that: {inputs}.")
        whole = prod(n for name, n in mesh.axes if intent_of(Axis(name), split_batch=True).follow & follow)
        if not any(shapes[item][dim] % whole == 0 for item, dim in there):
            item, dim = there[0]
            size = shapes[item][dim]
            raise PlanError(
                f"dimension {dim} of the batch input '{item.name}', its {meanings[item][dim].value}, has size {size}, "  # type: ignore[union-attr]
                f"which does not divide over {whole} ranks ({mesh}). Use a size of {_sizes(size, whole)}."
            )


def _sizes(size: int, parts: int) -> str:
    below = size - size % parts
    return " or ".join(str(found) for found in (below, below + parts) if found > 0)
