"""Rules: for each operator, in named axes, the ways in which it can be split along one mesh axis.

A rule is written as the axes of each input and output (`mm: "ik,kj->ij"`). The strategies follow mechanically: split
one axis everywhere it occurs; an axis that only inputs have leaves a partial sum. The notation is that of einsum and of
Tofu's operator descriptions (Wang, Huang, Li: Supporting Very Large Models using Automatic Dataflow Graph Partitioning,
EuroSys 2019). An operator without a rule is replicated: correct, and reported.
"""

from paceline.placement.rules import (  # noqa: F401  (importing a family registers its rules)
    attention,
    constraint,
    contraction,
    convolution,
    creation,
    embedding,
    group_norm,
    indexing,
    loss,
    nll,
    normalization,
    pointwise,
    reduction,
    softmax,
    structural,
    windows,
)
from paceline.placement.rules.rule import (
    AxisRule,
    Call,
    Factors,
    MapRule,
    Move,
    Rule,
    Strategy,
    Written,
    has_rule,
    rule_of,
)

__all__ = ["AxisRule", "Call", "Factors", "MapRule", "Move", "Rule", "Strategy", "Written", "has_rule", "rule_of"]
