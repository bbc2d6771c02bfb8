"""Group norm whose places are split has the statistics of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.placement.rules import rule_of
from tests.placement.drawn import rand
from tests.placement.oracle import faults, instance, strategies_of

aten = torch.ops.aten


def check(target: Any, *args: Any, parts: int) -> None:
    made = instance(target, *args)
    rule = rule_of(made.call)
    assert {"s0", "s1"} <= {strategy.label for strategy in strategies_of(made.call, rule, parts)}
    assert not list(faults(made, parts, rule))


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("affine", [True, False])
def test_of_pictures(parts: int, groups: int, affine: bool) -> None:
    torch.manual_seed(0)
    x = rand(2, 6, 6, 12) + 100.0  # far from zero, where squares cancel
    weight, bias = (rand(6), rand(6)) if affine else (None, None)
    sizes = 2, 6, 72, groups
    check(aten.native_group_norm.default, x, weight, bias, *sizes, 1e-5, parts=parts)
    _, mean, rstd = aten.native_group_norm.default(x, weight, bias, *sizes, 1e-5)
    for mask in ([True, affine, affine], [False, affine, affine], [True, False, False]):
        if any(mask):
            args = rand(*x.shape), x, mean, rstd, weight
            check(aten.native_group_norm_backward.default, *args, *sizes, mask, parts=parts)
