"""What a rule is, and the register of rules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import Placement, Shape

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

Label = Hashable


@dataclass(frozen=True)
class Factors:
    """A dimension that is a product of axes, outermost first: `(g r)` in the notation of einops.

    `Factors((("g", 4), ("r", 2)))` is a dimension of size 8 made of 4 groups of 2. Splitting `g` gives whole groups to
    each rank; splitting `r` gives each rank a part of every group. A factor named None stays whole, so that
    `Factors(((None, 3), ("j", 5)))` is three axes `j` one after the other.
    """

    axes: tuple[tuple[Label | None, int], ...]


Axes = tuple[Label | Factors | None, ...]
"""The name of each dimension of a tensor; None marks a dimension that stays whole."""


@dataclass(frozen=True)
class Call:
    """An operator call as rules see it: shapes instead of tensors.

    Attributes:
        target: the operator overload (or one of our own graph functions).
        arguments: every argument by its schema name, defaults filled in; tensors appear as their index in `inputs`
            wrapped in `Input`.
        inputs: shape of each tensor argument, in the order in which they occur.
        dtypes: dtype of each tensor argument.
        outputs: shape of each result; None where the operator returns no tensor.
        output_dtypes: dtype of each result.
    """

    target: Any
    arguments: Mapping[str, Any]
    inputs: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    outputs: tuple[Shape | None, ...]
    output_dtypes: tuple[torch.dtype | None, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


@dataclass(frozen=True)
class Input:
    """Stands for the tensor argument number `index` inside `Call.arguments`."""

    index: int


@dataclass(frozen=True)
class Strategy:
    """One way to run an operator on one mesh axis: a placement for every input and output.

    `label` is the axis that is split, for explanations and for rules that must adjust arguments.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    label: Label | None = None


Localize = Callable[[dict[str, Any], Strategy, int], dict[str, Any]]
"""(arguments, strategy, ranks on the axis) -> the arguments whose values change on a local piece, by schema name."""


def unchanged(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
    """The `Localize` of operators whose non-tensor arguments do not depend on sizes."""
    return {}


@dataclass(frozen=True)
class Move:
    """What a written strategy redistributes, for its price: `nbytes` of the whole tensor with respect to the axis."""

    nbytes: int
    source: Placement
    target: Placement


Write = Callable[["Writer", Mapping[str, Any], Strategy], Sequence["Node | None"]]
"""(writer, arguments by schema name with nodes for tensors, strategy) -> a node for each result of the operator."""


@dataclass(frozen=True)
class Written:
    """How a strategy is lowered that is more than its operator on pieces, and what it moves between ranks."""

    write: Write
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True)
class AxisRule:
    """A rule in named axes.

    Attributes:
        inputs: axes of each input.
        outputs: axes of each output.
        split: labels that may be split.
        pinned: placement of an input that lacks the split label, instead of Replicate (a bias under a split
            contraction is Partial: it is added once).
        results: placement of an output that lacks the split label, instead of Partial.
        linear: groups of input slots that may be partial sums together, all other inputs being replicated; the outputs
            are partial sums then.
        extra: further strategies that named axes do not express.
        localize: rewrites size arguments for local pieces.
        written: for the labels whose strategies are more than the operator on pieces, how they are lowered.
    """

    inputs: tuple[Axes, ...]
    outputs: tuple[Axes, ...]
    split: frozenset[Label]
    pinned: Mapping[tuple[Label, int], Placement] = field(default_factory=dict)
    results: Mapping[tuple[Label, int], Placement] = field(default_factory=dict)
    linear: tuple[tuple[int, ...], ...] = ()
    extra: tuple[Strategy, ...] = ()
    localize: Localize = unchanged
    written: Mapping[Label, Written] = field(default_factory=dict)


Carry = Callable[[Placement, int], "Placement | None"]


@dataclass(frozen=True)
class MapRule:
    """A rule of a structural operator with one tensor input: each placement of the input gives one of the outputs.

    `forward` maps the input's placement to that of every output, `backward` the other way; None means impossible.
    """

    forward: Carry
    backward: Carry
    localize: Localize = unchanged


Rule = AxisRule | MapRule
RuleFunction = Callable[[Call], Rule]

_RULES: dict[Any, RuleFunction] = {}


def rule(*targets: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function as the rule of these operators."""

    def register(function: RuleFunction) -> RuleFunction:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"{target} has a rule already")
            _RULES[target] = function
        return function

    return register


def einsum(*targets: Any, spec: str, split: str | None = None, **options: Any) -> None:
    """Register one-line rules such as `einsum(aten.mm.default, spec="ik,kj->ij")`.

    `split` lists the labels that may be split (all by default). Optional trailing inputs may be absent from a call.
    """
    left, right = spec.replace(" ", "").split("->")
    inputs = tuple(tuple(axes) for axes in left.split(","))
    outputs = tuple(tuple(axes) for axes in right.split(","))
    labels = frozenset(split if split is not None else set(left + right) - {","})
    rule(*targets)(lambda call: AxisRule(inputs[: len(call.inputs)], outputs, labels, **options))


def registered() -> list[Any]:
    """Return the operators that have a rule of their own, by name."""
    return sorted((target for target in _RULES if not isinstance(target, str)), key=str)


def has_rule(target: Any) -> bool:
    """Whether the operator has a rule of its own or is known to be pointwise."""
    return target in _RULES or is_pointwise(target)


def is_pointwise(target: Any) -> bool:
    """Whether torch tags the operator as pointwise, and rightly so: it tags `equal` and `rrelu` too."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return all(str(result.type) == "Tensor" for result in target._schema.returns)


def rule_of(call: Call) -> Rule:
    """Return the rule of a call; an operator without one is replicated, which is always legal."""
    function = _RULES.get(call.target)
    if function is None and is_pointwise(call.target):
        function = _RULES["pointwise"]
    if function is not None:
        return function(call)
    return AxisRule(
        tuple((None,) * len(shape) for shape in call.inputs),
        tuple((None,) * len(shape or ()) for shape in call.outputs),
        frozenset(),
    )
