"""What the dimensions of batch inputs mean: batch, time, height, width.

A program says it only by shapes, types and who reads them. The first dimension is the batch where it has the batch's
size. Tensors of whole numbers or booleans are tokens [B, T], or maps of labels [B, H, W] beside images. Floating-point
tensors are images [B, C, H, W], volumes [B, C, T, H, W], videos [B, T, C, H, W], or sequences: of features [B, T, F],
or [B, F, T] when a convolution reads them, and of samples of sound [B, T].
"""

from __future__ import annotations

from enum import Enum
from typing import Any

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
    images = [item for item in nodes if item not in exact and _is_image(shapes[item], times, nodes[item])]
    places = {_last_two(shapes[item]) for item in images}
    found = {}
    for item, shape in shapes.items():
        if len(shape) > 2 and (item in images or (len(shape) < 5 and _last_two(shape) in places)):
            rest = _places(shape, nodes[item])
        else:
            rest = _tokens(shape, size, times) if item in exact else _features(shape, times, nodes[item])
        first = Dimension.BATCH if shape[:1] == (size,) else None
        found[item] = (first, *rest)[: len(shape)]
    return found


def _last_two(shape: Shape) -> Shape:
    return shape[-2:]


def _places(shape: Shape, node: Node) -> Dimensions:
    """Images, and what is told of each of their places: labels, masks, depths."""
    before: Dimensions = (None,) * (len(shape) - 3)
    if len(shape) == 5:
        before = (None, Dimension.TIME) if _is_convolved(node) else (Dimension.TIME, None)
    return *before, Dimension.HEIGHT, Dimension.WIDTH


def _tokens(shape: Shape, size: int, times: set[int]) -> Dimensions:
    if len(shape) == 3 and shape[0] != size and shape[1] == size and shape[2] in times:
        return None, Dimension.TIME  # positions of several kinds: [K, B, T]
    return (Dimension.TIME, *(None,) * (len(shape) - 2))


def _features(shape: Shape, times: set[int], node: Node) -> Dimensions:
    match len(shape):
        case 2:
            return (Dimension.TIME if shape[1] in times or _is_convolved(node, aten.unsqueeze.default) else None,)
        case 3 if _is_convolved(node):
            return None, Dimension.TIME
        case 3:
            return Dimension.TIME, None
        case 4:
            return None, Dimension.TIME, None
    return (None,) * (len(shape) - 1)


def _is_image(shape: Shape, times: set[int], node: Node) -> bool:
    """Whether it has places: all that has four dimensions, but for masks of attention [B, heads, T, T]."""
    is_mask = len(shape) == 4 and shape[2] == shape[3] and shape[2] in times and not _is_convolved(node)
    return len(shape) in (4, 5) and not is_mask


def _is_convolved(node: Node, *through: Any) -> bool:
    """Whether a convolution reads it, as it is or after operators that keep its elements and those of `through`."""
    for user in node.users:
        if user.target is aten.convolution.default and resolve(user.args[0]).node is node:  # type: ignore[arg-type]
            return True
        if user.target in (*_SAME_ELEMENTS, *through) and _is_convolved(user, *through):
            return True
    return False
