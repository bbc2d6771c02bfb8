"""Products of matrices."""

from __future__ import annotations

import torch

from paceline.placement.placements import PARTIAL
from paceline.placement.rules.rule import Axes, AxisRule, Call, einsum, rule
from paceline.placement.rules.words import broadcast

aten = torch.ops.aten

einsum(aten.mm.default, spec="ik,kj->ij")
einsum(aten.bmm.default, spec="bik,bkj->bij")
einsum(aten.mv.default, spec="ik,k->i")
einsum(aten.dot.default, aten.vdot.default, spec="k,k->")


def _product_added(call: Call, left: str, right: str, result: str) -> AxisRule:
    """A product that is added to a tensor which broadcasts; under a split contraction that tensor is added once."""
    assert call.outputs[0] is not None
    added: Axes = broadcast(call.inputs[0], call.outputs[0], tuple(result))
    return AxisRule(
        (added, tuple(left), tuple(right)),
        (tuple(result),),
        frozenset(left + right),
        pinned={("k", 0): PARTIAL},
    )


@rule(aten.addmm.default)
def _addmm(call: Call) -> AxisRule:
    return _product_added(call, "ik", "kj", "ij")


@rule(aten.baddbmm.default)
def _baddbmm(call: Call) -> AxisRule:
    return _product_added(call, "bik", "bkj", "bij")


@rule(aten.addmv.default)
def _addmv(call: Call) -> AxisRule:
    return _product_added(call, "ik", "k", "i")
