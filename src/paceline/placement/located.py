"""Functions in a graph that know where their rank stands along an axis.

Their last two arguments are the axis and its ranks, as those of `redistribute`. Calling them computes shapes only; the
runtime binds them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.placement.rules.rule import AxisRule, Call, rule


def coordinate(axis: str, parts: int) -> Tensor:
    """Where the rank stands along the axis: a whole number on the CPU, whatever the device of those who use it."""
    return torch.zeros((), dtype=torch.int64)


@rule(coordinate)
def _coordinate(call: Call) -> AxisRule:
    """For another axis it is a number as any other."""
    return AxisRule((), ((),), frozenset())
