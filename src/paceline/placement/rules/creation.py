"""Operators that make tensors. Constants may be made in pieces; random numbers are drawn whole.

Every rank draws the mask of the global batch with the generator of the serial run, and slices it: that is what keeps a
parallel run equal to the serial one.
"""

from __future__ import annotations

import torch

from paceline.placement.placements import PARTIAL, REPLICATE
from paceline.placement.rules.rule import AxisRule, Call, Strategy, rule
from paceline.placement.rules.words import labels_in, numbered, sized, whole

aten = torch.ops.aten


@rule(
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.empty.memory_format,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
)
def _constant(call: Call) -> AxisRule:
    axes = numbered(len(call.outputs[0] or ()))
    inputs = tuple(map(whole, call.inputs))
    return AxisRule(inputs, (axes,), labels_in([axes]), localize=sized("size", call.outputs[0]))


@rule(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default)
def _constant_like(call: Call) -> AxisRule:
    axes = numbered(len(call.inputs[0]))
    # only the shape of the input matters: partial sums need not be added up first
    shape_only = Strategy((PARTIAL,), (REPLICATE,), "shape only")
    return AxisRule((axes,), (axes,), labels_in([axes]), extra=(shape_only,))


@rule(
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.eye.default,
    aten.eye.m,
    aten.scalar_tensor.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
    aten.rand.default,
    aten.rand.generator,
    aten.randn.default,
    aten.randn.generator,
    aten.randint.default,
    aten.randint.low,
    aten.randperm.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.normal_functional.default,
    aten.uniform.default,
    aten.multinomial.default,
    aten.exponential.default,
    aten.rrelu_with_noise_functional.default,
    aten.native_dropout.default,
)
def _whole(call: Call) -> AxisRule:
    return AxisRule(tuple(map(whole, call.inputs)), tuple(map(whole, call.outputs)), frozenset())
