"""What a mesh axis asks of the solver.

The placement of the inputs does not decide how operators are split: with a replicated batch a solver would slice the
ids and do data parallelism. So an axis states which dimensions of the batch it follows, which it leaves whole, and
where parameters live; within that the solver is free.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from paceline.errors import PlanError
from paceline.placement.dimensions import Dimension, Dimensions
from paceline.placement.placements import REPLICATE, Placement, Shape, Shard, divides
from paceline.plan import Axis
from paceline.program.program import Input, InputRole


class Parameters(Enum):
    """Where parameters live along an axis."""

    WHOLE = "whole"
    SHARDED = "sharded"
    """Split along the first dimension that divides, where pieces are contiguous. Where none does they stay whole."""
    SPLIT = "split"
    """Matrices and kernels are split along the dimension that the solver finds best; vectors as it likes."""
    FREE = "free"


@dataclass(frozen=True)
class Intent:
    """The constraints of an axis.

    Attributes:
        follow: batch inputs are split along one of these dimensions, and every operator that has a dimension which
            descends from it runs split along it.
        avoid: no operator is split along what descends from these dimensions.
        regions: of these, such as are split outside of products: between two products of a block, norms and residuals
            need each token once (sequence-parallel regions of Megatron; Korthikanti et al., 2022).
        ring: keys and values of attention go round a ring of ranks where they can, and are not gathered.
        parameters: where parameters live.
        whole: every operator runs whole.
    """

    follow: frozenset[Dimension] = frozenset()
    avoid: frozenset[Dimension] = frozenset()
    regions: frozenset[Dimension] = frozenset()
    ring: bool = False
    parameters: Parameters = Parameters.WHOLE
    whole: bool = False


_DATA = frozenset(Dimension)


def intent_of(axis: Axis, *, split_batch: bool, saves_memory: bool = False) -> Intent:
    """Return what an axis asks for.

    Args:
        axis: what the axis is for.
        split_batch: False for a batch too small to divide.
        saves_memory: what ranks hold is limited, so that `tp` splits also what it would keep whole, and `sp` does not
            gather keys and values.

    Raises:
        PlanError: the axis is that of a pipeline.
    """
    match axis:
        case Axis.DP | Axis.FSDP:
            where = Parameters.SHARDED if axis is Axis.FSDP else Parameters.WHOLE
            follow = frozenset({Dimension.BATCH}) if split_batch else frozenset()
            return Intent(follow=follow, parameters=where, whole=not split_batch)
        case Axis.SP:  # the patches of an image are a sequence that runs along its height
            return Intent(follow=frozenset({Dimension.TIME, Dimension.HEIGHT}), ring=saves_memory)
        case Axis.HW:
            return Intent(follow=frozenset({Dimension.HEIGHT, Dimension.WIDTH}))
        case Axis.TP:
            regions = frozenset({Dimension.TIME}) if saves_memory else frozenset()
            return Intent(avoid=_DATA, regions=regions, parameters=Parameters.SPLIT)
        case Axis.AUTO:
            return Intent(parameters=Parameters.FREE)
        case Axis.PP:
            raise PlanError("an axis of stages splits no tensor; place the program on the other axes (`mesh.inner`).")


_STRIPES = (8, 4, 2)
_LEAST_ROWS = 16
"""Of a stripe on one rank; fewer do not keep a kernel busy."""


def followed(shape: Shape, meaning: Dimensions, intent: Intent, parts: int, causal: Collection[int]) -> list[Shard]:
    """Return the splits of a batch input of `shape` that an intent follows: those that divide.

    Time is split in stripes where it has one of the lengths in `causal`, over which tokens see only those before them:
    the later a token, the more work it is, and a rank with stripes all over has its share of early ones and late ones.
    """
    shards = [
        Shard(dim, _stripes(shape[dim], parts) if what is Dimension.TIME and shape[dim] in causal else 1)
        for dim, what in enumerate(meaning)
        if what in intent.follow
    ]
    return [shard for shard in shards if divides(shape, shard, parts)]


def _stripes(length: int, parts: int) -> int:
    """The most blocks of a sequence of which a rank's part is not too short."""
    fitting = (n for n in _STRIPES if length % (n * parts) == 0 and length // (n * parts) >= _LEAST_ROWS)
    return next(fitting, 1)


def allowed_input_placements(item: Input, shape: Shape, shards: list[Shard], intent: Intent) -> list[Placement]:
    """Return the placements that an intent allows for a parameter or buffer of `shape`, of which `shards` are known."""
    if item.role not in (InputRole.PARAMETER, InputRole.BUFFER):
        return [REPLICATE]
    match intent.parameters:
        case Parameters.SHARDED if item.role is InputRole.PARAMETER:
            plain = [shard for shard in shards if shard.blocks == 1]
            return [*plain[:1]] or [REPLICATE]
        case Parameters.SPLIT if item.role is InputRole.PARAMETER and len(shape) > 1 and shards:
            return [*shards]
        case Parameters.SPLIT | Parameters.FREE:
            return [REPLICATE, *shards]
    return [REPLICATE]
