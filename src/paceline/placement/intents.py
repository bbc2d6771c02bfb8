"""What a mesh axis asks of the solver.

The placement of the inputs does not decide how operators are split: with a replicated batch a solver would slice the
ids and do data parallelism. So an axis states which dimensions it follows and where parameters live; within that the
solver is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import PlanError
from paceline.placement.placements import REPLICATE, Placement, Shard
from paceline.plan import Axis, Mesh
from paceline.program.program import Input, InputRole


@dataclass(frozen=True)
class Intent:
    """The constraints of an axis.

    Attributes:
        split_batch: batch inputs are split along their batch dimension, and every operator that has a dimension which
            descends from it runs split along it.
        shard_parameters: each parameter that divides is split along one of its dimensions; otherwise all are whole.
    """

    split_batch: bool
    shard_parameters: bool


def intent_of(axis: Axis, *, split_batch: bool) -> Intent:
    """Return what an axis asks for; `split_batch=False` is for a batch too small to divide."""
    match axis:
        case Axis.DP:
            return Intent(split_batch, shard_parameters=False)
        case Axis.FSDP:
            return Intent(split_batch, shard_parameters=True)


def allowed_input_placements(
    item: Input, shape: tuple[int, ...], shards: list[Shard], batch: int, intent: Intent
) -> list[Placement]:
    """Return the placements that an intent allows for a program input of `shape`.

    `batch` is the size of the batch dimension here. A parameter is split along its first dimension that divides, where
    pieces are contiguous; one that does not divide at all stays whole.
    """
    match item.role:
        case InputRole.PARAMETER if intent.shard_parameters:
            plain = [shard for shard in shards if shard.blocks == 1]
            return [*plain[:1]] or [REPLICATE]
        case InputRole.BATCH if intent.split_batch and shape and shape[0] == batch:
            return [Shard(0)]
    return [REPLICATE]


def check_batch(batch: int, mesh: Mesh) -> None:
    """Check that the global batch divides over the axes that split it.

    Raises:
        PlanError: it does not; the message names sizes that do.
    """
    if batch % mesh.size == 0:
        return
    below = batch - batch % mesh.size
    sizes = " or ".join(str(size) for size in (below, below + mesh.size) if size > 0)
    divisors = [n for n in range(1, batch + 1) if batch % n == 0 and n <= 64]
    raise PlanError(
        f"a batch of {batch} does not divide over {mesh.size} ranks (mesh {mesh}). Use a batch of {sizes}, "
        f"or a mesh of {', '.join(map(str, divisors))} ranks."
    )
