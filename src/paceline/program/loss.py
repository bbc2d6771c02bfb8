"""What kind of mean the loss is.

Micro-batches with unequal numbers of valid tokens add up to the gradient of the full batch only when each is weighted
by what its loss was divided by. That weight is read off the captured graph: the count of a cross-entropy or of a mask,
or the number of elements of a mean. A loss of several terms has a weight when all that depend on the batch were divided
by the same count. Nothing is guessed: a loss of another form has no weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from paceline.program.program import InputRole, Output, OutputRole, Program

aten = torch.ops.aten
_SAME_VALUE = {
    aten.view.default,
    aten.reshape.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.expand.default,
}
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_LOSS_SUMS = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
_TERMS = {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar}
_NEGATIONS = {aten.bitwise_not.default, aten.logical_not.default}
Count = float | Node
"""What a mean was divided by: its number of elements, or a node that computes it from the batch."""


class _UnknownForm(Exception):
    """The loss is no sum of means."""


def add_weight(program: Program) -> None:
    """Set `program.weight`, or add the weight as second output, where the loss is a recognised mean."""
    try:
        counts = list(_Loss(program).counts(program.results[0]))
    except _UnknownForm:
        return
    if len({_key(count) for count in counts}) != 1:
        return
    weight = counts[0]
    if isinstance(weight, float):
        program.weight = weight
        return
    values = [program.results[0], weight, *program.results[1:]]
    program.output_node.args = (tuple(values),)
    program.outputs = (program.outputs[0], Output(OutputRole.WEIGHT, "loss"), *program.outputs[1:])


class _Loss:
    def __init__(self, program: Program) -> None:
        role = {node: item.role for item, node in zip(program.inputs, program.placeholders, strict=True)}
        self._of_batch: set[Node] = set()
        self._of_parameters: set[Node] = set()
        for node in program.graph.nodes:
            for role_of_set, found in ((InputRole.BATCH, self._of_batch), (InputRole.PARAMETER, self._of_parameters)):
                if role.get(node) is role_of_set or any(source in found for source in node.all_input_nodes):
                    found.add(node)

    def counts(self, value: Any) -> Iterable[Count]:
        """Yield what each term of a loss was divided by; a term that is the same for every batch has no say."""
        node = _through(value)
        if not isinstance(node, Node) or node not in self._of_batch:
            return
        if node.target in _TERMS:
            yield from self.counts(node.args[0])
            yield from self.counts(node.args[1])
        elif node.target is aten.neg.default:
            yield from self.counts(node.args[0])
        elif node.target in _QUOTIENTS and node.args[1] in self._of_batch:
            yield self._count_of(node)
        elif node.target in _PRODUCTS and self._is_mean(node):
            yield float(_through(node.args[0]).args[0].meta["val"].numel())
        elif node.target in _PRODUCTS | _QUOTIENTS:
            factors = [arg for arg in node.args[:2] if isinstance(arg, Node) and arg in self._of_batch]
            if len(factors) != 1 or (node.target in _QUOTIENTS and factors[0] is not node.args[0]):
                raise _UnknownForm
            yield from self.counts(factors[0])
        else:
            raise _UnknownForm

    def _is_mean(self, node: Node) -> bool:
        total, factor = _through(node.args[0]), node.args[1]
        if not _is_whole_sum(total) or not isinstance(factor, float):
            return False
        return math.isclose(factor * total.args[0].meta["val"].numel(), 1.0, rel_tol=1e-9)

    def _count_of(self, node: Node) -> Node:
        """The count that a sum over the batch was divided by, itself a sum over the batch of what is no parameter."""
        count: Node = _through(node.args[1])
        if count.target in (aten.clamp.default, aten.clamp_min.default) and count.args[1] in (0, 1, 1.0):
            count = _through(count.args[0])  # against a division by zero: then the sum is zero, and so is the weight
        if not self._is_total(node.args[0]) or not _is_whole_sum(count) or count in self._of_parameters:
            raise _UnknownForm
        return count

    def _is_total(self, value: Any) -> bool:
        """Whether a value is a sum over the batch, or a multiple of one."""
        node = _through(value)
        if not isinstance(node, Node) or node not in self._of_batch:
            return False
        if node.target in _PRODUCTS | _QUOTIENTS or node.target is aten.neg.default:
            return all(arg not in self._of_batch for arg in node.args[1:]) and self._is_total(node.args[0])
        is_loss_sum = bool(node.args) and getattr(node.args[0], "target", None) in _LOSS_SUMS
        return _is_whole_sum(node) or is_loss_sum


def _through(value: Any) -> Any:
    """Look through what does not change a single value."""
    while isinstance(value, Node) and value.target in _SAME_VALUE and value.meta["val"].numel() == 1:
        source = value.args[0]
        if not isinstance(source, Node) or source.meta["val"].numel() != 1:
            return value
        value = source
    return value


def _is_whole_sum(node: Any) -> bool:
    return isinstance(node, Node) and node.target in _SUMS and node.meta["val"].numel() == 1


def _key(value: Any) -> Any:
    """A form in which two computations of one count are equal, as those in a loss with label smoothing."""
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    if not isinstance(value, Node) or value.op == "placeholder":
        return value
    if value.op == "get_attr":
        return ("constant", value.target)
    args: tuple[Any, ...] = value.args
    if value.target in _SAME_VALUE:
        return _key(args[0])
    if value.target in _NEGATIONS:
        return _negated(_key(args[0]))
    if value.target is aten.eq.Scalar:
        return _negated((aten.ne.Scalar, *_key(args)))
    if value.target is aten.masked_fill.Scalar:
        return ("where", _negated(_key(args[1])), _key(args[0]), float(args[2]))
    if value.target is aten.where.self:
        return ("where", _key(args[0]), _key(args[1]), _key(args[2]))
    if value.target is aten.scalar_tensor.default:
        return float(args[0])
    if value.target is aten.zeros_like.default:
        return 0.0
    if value.target is aten.gather.default and args[0].meta["val"].ndim == 1:
        return ("take", _key(args[0]), _key(args[2]))
    if value.target is aten.index.Tensor and len(args[1]) == 1:
        return ("take", _key(args[0]), _key(args[1][0]))
    return (value.target, *_key(args))


def _negated(key: Any) -> Any:
    return key[1] if isinstance(key, tuple) and key[0] == "not" else ("not", key)
