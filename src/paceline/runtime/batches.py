"""Batches: what the ranks of a process need of the one that they are given, whole or in part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch.utils._pytree as pytree
from torch import Tensor

from paceline.errors import PlanError
from paceline.placement.boxes import Box, patches
from paceline.plan import Axis, Mesh
from paceline.program.capture import Batch, batch_leaves
from paceline.program.program import InputRole
from paceline.runtime.executor import local_piece
from paceline.runtime.step import PlacedInput

Where = Sequence[tuple[int, int]]
"""(index, ranks) of a rank along each axis, outermost first."""


def grown(batch: Batch, count: int) -> Any:
    """Return a global batch, of values that nobody reads, of which `batch` is one of `count` parts.

    Tensors without the batch dimension, which is the first of the first tensor that has one, stay as they are.
    """
    size = next((leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 0)

    def grow(part: Tensor) -> Tensor:
        return part.new_empty((size * count, *part.shape[1:])) if part.shape[:1] == (size,) else part

    return pytree.tree_map_only(Tensor, grow, batch)


class HasInputs(Protocol):
    """A step of any kind: on which mesh its inputs are placed, and how."""

    @property
    def mesh(self) -> Mesh: ...  # noqa: D102  # the class tells
    @property
    def inputs(self) -> tuple[PlacedInput, ...]: ...  # noqa: D102  # the class tells


def pieces_of_whole(step: HasInputs, batch: Batch, where: Where) -> dict[str, Tensor]:
    """Return a rank's pieces of a global batch."""
    leaves = batch_leaves(batch)
    return {placed.item.name: local_piece(leaves[placed.item.name], placed.placements, where) for placed in _of(step)}


def pieces_of_part(step: HasInputs, batch: Batch, where: Where, index: int) -> dict[str, Tensor]:
    """Return a rank's pieces of a global batch of which part `index` is given.

    Axes that split no samples may cut that part further: the time of sequences, say.

    Raises:
        PlanError: the rank needs samples of another part.
    """
    leaves = batch_leaves(batch)
    return {placed.item.name: _piece(step.mesh, leaves[placed.item.name], placed, where, index) for placed in _of(step)}


def _of(step: HasInputs) -> list[PlacedInput]:
    return [placed for placed in step.inputs if placed.item.role is InputRole.BATCH]


def _piece(mesh: Mesh, given: Tensor, placed: PlacedInput, where: Where, index: int) -> Tensor:
    """Cut a piece out of one part of a tensor, or out of all of a tensor without the batch dimension.

    The placements are those of the whole: a split along an outer axis may reach into the samples of several parts.
    """
    shape = tuple(given.shape)
    offset = (0,) * len(shape) if shape == placed.shape else (index * shape[0], *(0 for _ in shape[1:]))
    part = Box(offset, shape)
    needed = patches(placed.shape, placed.placements, where)
    if [patch.whole for patch in needed] == [part]:
        return given
    if any(patch.whole.intersect(part) != patch.whole for patch in needed):
        better = Mesh(tuple(sorted(mesh.axes, key=lambda axis: not Axis(axis[0]).splits_batch)))
        raise PlanError(
            f"on mesh '{mesh}' this process was given other samples than its ranks compute: an axis that stands before "
            f"those that split the batch splits the samples of '{placed.item.name}' too. Name the axes that split the "
            f"batch first (mesh '{better}'), or call the module with the global batch."
        )
    last = needed[-1].local
    piece = given.new_empty([start + length for start, length in zip(last.offset, last.shape, strict=True)])
    for patch in needed:
        piece[patch.local.index] = given[patch.whole.inside(part).index]
    return piece
