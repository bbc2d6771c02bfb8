"""Operators that treat every element alike, with broadcasting.

Torch tags most of them; the rest are listed here. Some are linear, alone or jointly, in some of their inputs: partial
sums of those give partial sums of the result.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.placement.rules.rule import AxisRule, Call, rule
from paceline.placement.rules.words import broadcast, labels_in, numbered, replicated_where_absent

aten = torch.ops.aten

LINEAR: dict[Any, tuple[tuple[int, ...], ...]] = {
    aten.add.Tensor: ((0, 1),),
    aten.sub.Tensor: ((0, 1),),
    aten.mul.Tensor: ((0,), (1,)),
    aten.mul.Scalar: ((0,),),
    aten.div.Tensor: ((0,),),
    aten.div.Scalar: ((0,),),
    aten.neg.default: ((0,),),
    aten.clone.default: ((0,),),
    aten._to_copy.default: ((0,),),
    aten.lift_fresh_copy.default: ((0,),),
    aten.where.self: ((1, 2),),
    aten.addcmul.default: ((0, 1), (0, 2)),
    aten.addcdiv.default: ((0, 1),),
    aten.lerp.Scalar: ((0, 1),),
    aten.copy.default: ((1,),),
    aten.fill.Tensor: ((1,),),
    aten.masked_fill.Tensor: ((0, 2),),
    aten.native_dropout_backward.default: ((0,),),
    aten.threshold_backward.default: ((0,),),
    aten.gelu_backward.default: ((0,),),
    aten.silu_backward.default: ((0,),),
    aten.tanh_backward.default: ((0,),),
    aten.sigmoid_backward.default: ((0,),),
    aten.softplus_backward.default: ((0,),),
    aten.leaky_relu_backward.default: ((0,),),
    aten.hardtanh_backward.default: ((0,),),
    aten.hardswish_backward.default: ((0,),),
    aten.hardsigmoid_backward.default: ((0,),),
    aten.mish_backward.default: ((0,),),
    aten.elu_backward.default: ((0,),),
}
"""Groups of tensor inputs in which an operator is linear, the other inputs being fixed."""

LINEAR_WHEN_ZERO: dict[Any, tuple[str, tuple[int, ...]]] = {
    aten.masked_fill.Scalar: ("value", (0,)),
    aten.where.ScalarOther: ("other", (1,)),
    aten.where.ScalarSelf: ("self", (1,)),
}
"""Operators that are linear in a group of inputs when the named number is zero."""

UNTAGGED = (
    aten._to_copy.default,
    aten.lift_fresh_copy.default,
    aten.softplus_backward.default,
    aten.leaky_relu_backward.default,
    aten.hardtanh_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.mish_backward.default,
    aten.elu_backward.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.copy.default,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.fill.Scalar,
    aten.fill.Tensor,
    torch.ops.prims.convert_element_type.default,
)


@rule("pointwise", *UNTAGGED)
def pointwise(call: Call) -> AxisRule:
    """Every dimension may be split; a dimension that is broadcast stays whole in the smaller tensor."""
    full = call.outputs[0]
    assert full is not None
    axes = numbered(len(full))
    outputs = tuple(broadcast(shape or (), full, axes) for shape in call.outputs)
    return AxisRule(
        tuple(broadcast(shape, full, axes) for shape in call.inputs),
        outputs,
        labels_in([axes]),
        results=replicated_where_absent(outputs, range(len(outputs))),  # buffers left empty
        linear=_linear_groups(call),
    )


def _linear_groups(call: Call) -> tuple[tuple[int, ...], ...]:
    groups = LINEAR.get(call.target, ())
    if call.target in LINEAR_WHEN_ZERO:
        name, group = LINEAR_WHEN_ZERO[call.target]
        groups = (group,) if call[name] == 0 else ()
    # a number in the place of a tensor: x + 1 is not linear in x, x * 2 is
    return tuple(group for group in groups if max(group) < len(call.inputs))
