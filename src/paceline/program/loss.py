"""What kind of mean the loss is.

Micro-batches with unequal numbers of valid tokens add up to the gradient of the full batch only when each is weighted
by what its loss was divided by. That weight is read off the captured graph: the count of a cross-entropy, or the number
of elements of a mean. Nothing is guessed: a loss of another form has no weight.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from paceline.program.program import Output, OutputRole, Program

aten = torch.ops.aten
_SAME_VALUE = {
    aten.view.default,
    aten.reshape.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.squeeze.default,
    aten.unsqueeze.default,
}
_LOSS_SUMS = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


def add_weight(program: Program) -> None:
    """Set `program.weight`, or add the weight as second output, where the loss is a recognised mean."""
    loss = _through(program.results[0])
    if loss.target is aten.div.Tensor and isinstance(loss.args[1], Node) and _is_loss_sum(loss.args[0]):
        count = loss.args[1]
        values = [program.results[0], count, *program.results[1:]]
        program.output_node.args = (tuple(values),)
        program.outputs = (program.outputs[0], Output(OutputRole.WEIGHT, "loss"), *program.outputs[1:])
    elif loss.target is aten.mul.Tensor and isinstance(loss.args[1], float):
        total = _through(loss.args[0])
        if total.target is aten.sum.dim_IntList:
            elements = total.args[0].meta["val"].numel()  # type: ignore[union-attr]
            if total.meta["val"].numel() == 1 and math.isclose(loss.args[1] * elements, 1.0, rel_tol=1e-9):
                program.weight = float(elements)


def _through(node: object) -> Node:
    assert isinstance(node, Node)
    while node.target in _SAME_VALUE:
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def _is_loss_sum(value: object) -> bool:
    node = _through(value)
    return bool(node.args) and isinstance(node.args[0], Node) and node.args[0].target in _LOSS_SUMS
