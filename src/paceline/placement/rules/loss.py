"""Losses of single elements.

A mean over a split axis is no sum of the parts' means: capture writes means as sums and divisions.
"""

from __future__ import annotations

import torch

from paceline.placement.rules.rule import AxisRule, Call, rule
from paceline.placement.rules.words import labels_in, numbered, shape_of, whole

aten = torch.ops.aten
_NONE, _MEAN = 0, 1


@rule(
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
)
def _elementwise_loss(call: Call) -> AxisRule:
    axes = numbered(len(shape_of(call, "self")))
    same = _same_shape(call)
    inputs = tuple(axes if same else whole(shape) for shape in call.inputs)
    split = labels_in(inputs) if call["reduction"] != _MEAN else frozenset()
    return AxisRule(inputs, (axes if call["reduction"] == _NONE else (),), split)


@rule(
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss_backward.default,
)
def _elementwise_loss_backward(call: Call) -> AxisRule:
    # a mean divides by the number of elements that it sees, so it must see all of them
    axes = numbered(len(shape_of(call, "self")))
    same = _same_shape(call)
    inputs = tuple(axes if same and len(shape) == len(axes) else whole(shape) for shape in call.inputs)
    split = labels_in(inputs) if call["reduction"] != _MEAN else frozenset()
    return AxisRule(inputs, (axes,), split, linear=((0,),))


def _same_shape(call: Call) -> bool:
    """Whether nothing is broadcast (the gradient may be a number)."""
    names = [name for name in ("self", "target", "weight") if name in call.arguments and call[name] is not None]
    return len({shape_of(call, name) for name in names}) == 1
