"""What the dimensions of batch inputs mean: batch, time, height, width.

A program says it only by shapes, types and who reads them. The first dimension is the batch where it has the batch's
size. Tensors of whole numbers or booleans are tokens [B, T], or maps of labels [B, H, W] beside images. Floating-point
tensors are images [B, C, H, W] or sequences of features: [B, T, F], or [B, F, T] when a convolution reads them.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch.fx import Node

from paceline.placement.calls import resolve
from paceline.placement.placements import Shape
from paceline.program.program import Input, InputRole, Program

aten = torch.ops.aten


class Dimension(Enum):
    """What a dimension of a batch input means."""

    BATCH = "batch"
    TIME = "time"
    HEIGHT = "height"
    WIDTH = "width"


Dimensions = tuple[Dimension | None, ...]
_SAME_ELEMENTS = (aten._to_copy.default, aten.constant_pad_nd.default, aten.detach.default, aten.alias.default)


def batch_size(program: Program) -> int:
    """Size of the batch dimension: the first dimension of the first batch tensor that has one."""
    for item, node in zip(program.inputs, program.placeholders, strict=True):
        if item.role is InputRole.BATCH and node.meta["val"].ndim:
            return int(node.meta["val"].shape[0])
    return 1


def dimensions(program: Program) -> dict[Input, Dimensions]:
    """Return what each dimension of each batch input means; None where it is features, or cannot be told."""
    size = batch_size(program)
    nodes = {
        item: node
        for item, node in zip(program.inputs, program.placeholders, strict=True)
        if item.role is InputRole.BATCH
    }
    shapes: dict[Input, Shape] = {item: tuple(node.meta["val"].shape) for item, node in nodes.items()}
    exact = {item for item, node in nodes.items() if not node.meta["val"].is_floating_point()}
    times = {shape[1] for item, shape in shapes.items() if item in exact and len(shape) == 2}
    places = {
        _places(shape)
        for item, shape in shapes.items()
        if item not in exact and len(shape) == 4 and not _is_mask(shape, times)
    }
    found = {}
    for item, shape in shapes.items():
        rest = _exact(shape, places) if item in exact else _features(shape, times, nodes[item])
        first = Dimension.BATCH if shape[:1] == (size,) else None
        found[item] = (first, *rest)[: len(shape)]
    return found


def _places(shape: Shape) -> Shape:
    return shape[2:]


def _exact(shape: Shape, places: set[Shape]) -> Dimensions:
    if len(shape) == 3 and shape[1:] in places:
        return Dimension.HEIGHT, Dimension.WIDTH
    return (Dimension.TIME, *(None,) * (len(shape) - 2))


def _features(shape: Shape, times: set[int], node: Node) -> Dimensions:
    match len(shape):
        case 2:
            return (Dimension.TIME if shape[1] in times else None,)
        case 3 if _is_convolved(node):
            return None, Dimension.TIME
        case 3:
            return Dimension.TIME, None
        case 4 if _is_mask(shape, times):
            return None, Dimension.TIME, None
        case 4:
            return None, Dimension.HEIGHT, Dimension.WIDTH
    return (None,) * (len(shape) - 1)


def _is_mask(shape: Shape, times: set[int]) -> bool:
    """Whether it has the shape of an attention mask [B, heads, T, T]."""
    return shape[2] == shape[3] and shape[2] in times


def _is_convolved(node: Node) -> bool:
    for user in node.users:
        if user.target is aten.convolution.default and resolve(user.args[0]).node is node:  # type: ignore[arg-type]
            return True
        if user.target in _SAME_ELEMENTS and _is_convolved(user):
            return True
    return False
