"""Pooling, resizing and padding of images: batch and channels may be split, places stay whole."""

from __future__ import annotations

from typing import Any

import torch

from paceline.placement.placements import local_shape
from paceline.placement.rules.rule import Axes, AxisRule, Call, Strategy, rule
from paceline.placement.rules.words import labels_in, numbered

aten = torch.ops.aten

_LINEAR = {
    1: (
        aten.upsample_nearest1d.default,
        aten.upsample_linear1d.default,
        aten.reflection_pad1d.default,
        aten.replication_pad1d.default,
    ),
    2: (
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten.upsample_nearest2d.default,
        aten.upsample_nearest2d_backward.default,
        aten.upsample_bilinear2d.default,
        aten.upsample_bilinear2d_backward.default,
        aten.upsample_bicubic2d.default,
        aten.upsample_bicubic2d_backward.default,
        aten._upsample_bilinear2d_aa.default,
        aten._upsample_bilinear2d_aa_backward.default,
        aten._upsample_bicubic2d_aa.default,
        aten._upsample_bicubic2d_aa_backward.default,
        aten.reflection_pad2d.default,
        aten.reflection_pad2d_backward.default,
        aten.replication_pad2d.default,
        aten.replication_pad2d_backward.default,
    ),
    3: (
        aten.avg_pool3d.default,
        aten.avg_pool3d_backward.default,
        aten._adaptive_avg_pool3d.default,
        aten._adaptive_avg_pool3d_backward.default,
    ),
}
"""Operators that are linear in their first input, by the number of dimensions of a place."""

_NONLINEAR = {
    2: (
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.adaptive_max_pool2d.default,
        aten.adaptive_max_pool2d_backward.default,
    ),
    3: (aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default),
}


def _windowed(places: int, linear: tuple[tuple[int, ...], ...]) -> Any:
    def windowed(call: Call) -> AxisRule:
        leading = numbered(len(call.inputs[0]) - places)  # batch and channels, or channels alone
        axes: Axes = leading + (None,) * places

        def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
            if "input_size" not in arguments:
                return {}
            return {"input_size": list(local_shape(call.outputs[0] or (), strategy.outputs[0], parts))}

        return AxisRule(
            (axes,) * len(call.inputs),
            (axes,) * len(call.outputs),
            labels_in([axes]),
            linear=linear,
            localize=localize,
        )

    return windowed


for _places, _targets in _LINEAR.items():
    rule(*_targets)(_windowed(_places, ((0,),)))
for _places, _targets in _NONLINEAR.items():
    rule(*_targets)(_windowed(_places, ()))
